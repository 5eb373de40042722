"""The torch.library boundary: opaque ops with fakes, so that torch.compile sees one node and asks no question.

The implementation is selected inside, where the device is known and nothing is traced; `impl` "" stands for None.

Plain `define`/`impl` rather than `custom_op`: the latter costs several microseconds more per call.
"""

import torch

from . import reference
from .backend import select

_library = torch.library.Library("gva", "DEF")

_library.define(
    "paged_attention(Tensor q_absorbed, Tensor q_rope, Tensor value_pages, Tensor rope_pages, Tensor block_table,"
    " Tensor seq_lens, Tensor? cu_seqlens_q, int max_seqlen_q, float scale, Tensor? value_scales, str impl,"
    " Tensor? schedule, Tensor(a!)? part_out, Tensor(b!)? part_lse, int[] config, int split_tiles,"
    " Tensor(c!) out, Tensor(d!)? lse) -> ()"
)
_library.define(
    "append(Tensor values, Tensor k_rope, Tensor(a!) value_pages, Tensor(b!) rope_pages, Tensor slots,"
    " Tensor? positions, Tensor? cos, Tensor? sin, Tensor(c!)? value_scales, str impl) -> ()"
)


def _paged_attention(
    q_absorbed,
    q_rope,
    value_pages,
    rope_pages,
    block_table,
    seq_lens,
    cu_seqlens_q,
    max_seqlen_q,
    scale,
    value_scales,
    impl,
    schedule,
    part_out,
    part_lse,
    config,
    split_tiles,
    out,
    lse,
):
    named, impl = bool(impl), select(impl or None, q_absorbed.device, q_absorbed.dtype, value_pages.dtype)
    if impl == "reference":
        starts = cu_seqlens_q
        if starts is None:
            starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device) * max_seqlen_q
        result, result_lse = reference.paged_attention(
            q_absorbed,
            q_rope,
            value_pages,
            rope_pages,
            block_table,
            seq_lens,
            starts,
            max_seqlen_q,
            scale,
            value_scales,
        )
        out.copy_(result)
        if lse is not None:
            lse.copy_(result_lse)
        return
    from .config import Config, pick
    from .cuda.launch import misfit
    from .triton import launch

    _, H, d_h = q_absorbed.shape
    G = value_pages.shape[2]
    if schedule is not None:
        config, workspace = Config(*config), launch.Workspace(schedule, part_out, part_lse)
        if named and impl != config.impl:
            raise ValueError(f"plan: made for impl={config.impl!r}, called with impl={impl!r}")
        lacking = misfit(value_pages, rope_pages, value_scales) if config.hopper else None
        if lacking is not None:
            raise ValueError(f"plan: made for a kernel that needs {lacking}")
    else:
        config = pick(
            impl if named else None,
            q_absorbed.device,
            q_absorbed.dtype,
            value_pages.dtype,
            G=G,
            R=H // G,
            d_h=d_h,
            d_r=q_rope.shape[2],
            page=value_pages.shape[1],
            max_seqlen_q=max_seqlen_q,
            B=len(seq_lens),
            row_stride=value_pages.stride(1),
            in_rows=misfit(value_pages, rope_pages, value_scales) is None,
        )
        workspace = launch.allocate(
            config,
            q_absorbed.device,
            B=len(seq_lens),
            G=G,
            R=H // G,
            d_h=d_h,
            max_seqlen_q=max_seqlen_q,
            split_tiles=0,
            max_tokens=0,
        )
        launch.fill_schedule(config, workspace, seq_lens, cu_seqlens_q, max_seqlen_q)
    launch.attend(
        config,
        workspace,
        split_tiles,
        q_absorbed,
        q_rope,
        value_pages,
        rope_pages,
        block_table,
        seq_lens,
        cu_seqlens_q,
        max_seqlen_q,
        scale,
        value_scales,
        out,
        lse,
    )


def append(values, k_rope, value_pages, rope_pages, slots, positions, cos, sin, value_scales, impl=""):
    """`api.append` without its checks and outside torch.library, for callers that count microseconds."""
    impl = select(impl or None, values.device, values.dtype, value_pages.dtype)
    if impl == "reference":
        reference.append(values, k_rope, value_pages, rope_pages, slots, positions, cos, sin, value_scales)
        return
    from .triton import launch

    launch.append(values, k_rope, value_pages, rope_pages, slots, positions, cos, sin, value_scales)


def _on_its_device(op):
    """Triton launches on the current device, wherever the tensors are."""

    def run(first, *others):
        with torch.cuda.device_of(first):
            op(first, *others)

    return run


_library.impl("paged_attention", _on_its_device(_paged_attention), "CompositeExplicitAutograd")
_library.impl("append", _on_its_device(append), "CompositeExplicitAutograd")
torch.library.register_fake("gva::paged_attention", lambda *args: None, lib=_library)
torch.library.register_fake("gva::append", lambda *args: None, lib=_library)
