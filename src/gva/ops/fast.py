"""The fast door, for callers that count microseconds on the host: the layers of an engine, serving's above all.

The public operations check their arguments and cross torch.library, which is most of their time on the host. These do
neither: what is wrong shows itself in the kernel, torch.compile sees no node of ours, and tensors must lie on the
current device. Kernels run where they can, the reference elsewhere.
"""

from __future__ import annotations

from torch import Tensor

from . import dispatch
from .call import Batch, Call, Pages
from .plan import DecodePlan


def attend(
    plan: DecodePlan | None, q_absorbed: Tensor, q_rope: Tensor, pages: Pages, block_table: Tensor, seq_lens: Tensor,
    scale: float, out: Tensor,
) -> None:  # fmt: skip
    """`paged_attention` into `out` [N, H, d_h], of sequences with as many queries each as `plan` was made for; without
    one, as on a CPU, with N / B each."""
    queries = q_absorbed.shape[0] // max(1, seq_lens.shape[0]) if plan is None else plan.shape.max_seqlen_q
    call = Call(q_absorbed, q_rope, pages, Batch(block_table, seq_lens, None, queries), scale, out, None)
    if plan is None:
        dispatch.attend(call)
    else:
        dispatch.run(call, plan)


def append(state: Tensor, k_rope: Tensor, pages: Pages, slots: Tensor) -> None:
    """Writes new rows: state [N, G, d_h] and k_rope [N, d_r], rotated, at slots [N]; a negative slot is padding."""
    dispatch.append(state, k_rope, pages, slots)


def absorb(q: Tensor, maps: Tensor) -> Tensor:
    """q_h M_h^T, contiguous [N, H, d_h]: queries for grouped values as they are cached.

    q     [N, H, >= d_n]   content first; any strides over N and H
    maps  [H, d_n, d_h]    M_h^T, contiguous
    """
    return dispatch.absorb(q, maps)


def expand(values: Tensor, k_rope: Tensor, maps: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Keys [T, H, d_n + d_r] and values [T, H, d_h] of tokens one after another.

    values  [T, G, d_h] and k_rope [T, d_r]; or, with `slots` [T], the pages [P, page, G, d_h] and [P, page, d_r] that
            hold them, where a slot is page id * page + row in the page
    maps    [H, d_n, d_h]    M_h^T
    """
    return dispatch.expand(values, k_rope, maps, slots)
