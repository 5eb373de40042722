"""The fast door, for callers that count microseconds on the host: the layers of `gva.serve` and of `gva.paged`.

The public operations check their arguments and cross torch.library, which is most of their time on the host. These do
neither: what is wrong shows itself in the kernel, torch.compile cannot trace them, and tensors must lie on the current
device. Kernels run where they can, the reference elsewhere.
"""

from __future__ import annotations

from torch import Tensor

from . import library
from .absorb import absorb_tokens
from .call import Pages
from .expand import expand_tokens
from .plan import DecodePlan


def attend(
    plan: DecodePlan, q_absorbed: Tensor, q_rope: Tensor, pages: Pages, block_table: Tensor, seq_lens: Tensor,
    scale: float, out: Tensor,
) -> None:  # fmt: skip
    """`paged_attention` into `out` [N, H, d_h], of sequences with as many queries each as `plan` was made for."""
    launch, config, workspace = plan._launcher
    launch.attend(
        config,
        workspace,
        plan.split_tiles,
        q_absorbed,
        q_rope,
        pages.values,
        pages.k_rope,
        block_table,
        seq_lens,
        None,
        plan.shape["max_seqlen_q"],
        scale,
        pages.scales,
        out,
        None,
    )


def append(state: Tensor, k_rope: Tensor, pages: Pages, slots: Tensor) -> None:
    """Writes new rows: state [N, G, d_h] and k_rope [N, d_r], rotated, at slots [N]; a negative slot is padding."""
    library.append(state, k_rope, pages.values, pages.k_rope, slots, None, None, None, pages.scales)


def absorb(q: Tensor, maps: Tensor) -> Tensor:
    """q_h M_h^T, contiguous [N, H, d_h]: queries for grouped values as they are cached.

    q     [N, H, >= d_n]   content first; any strides over N and H
    maps  [H, d_n, d_h]    M_h^T, contiguous
    """
    return absorb_tokens(q, maps)


def expand(values: Tensor, k_rope: Tensor, maps: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Keys [T, H, d_n + d_r] and values [T, H, d_h] of tokens one after another.

    values  [T, G, d_h] and k_rope [T, d_r]; or, with `slots` [T], the pages [P, page, G, d_h] and [P, page, d_r] that
            hold them, where a slot is page id * page + row in the page
    maps    [H, d_n, d_h]    M_h^T
    """
    return expand_tokens(values, k_rope, maps, slots)
