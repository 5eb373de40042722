"""The torch.library boundary: opaque ops with fakes, so that torch.compile sees one node and asks no question.

The implementation is selected inside, where the device is known and nothing is traced; `impl` "" stands for None.

Plain `define`/`impl` rather than `custom_op`: the latter costs several microseconds more per call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import dispatch
from .call import Batch, Call, Pages, Rotation
from .config import Config
from .schedule import Work

_library = torch.library.Library("gva", "DEF")

_library.define(
    "paged_attention(Tensor q_absorbed, Tensor q_rope, Tensor values, Tensor k_rope, Tensor? scales,"
    " Tensor block_table, Tensor seq_lens, Tensor? cu_seqlens_q, int max_seqlen_q, float scale, Tensor(a!) out,"
    " Tensor(b!)? lse, int[] config, int split_tiles, Tensor? schedule, Tensor(c!)? part_out, Tensor(d!)? part_lse,"
    " str impl) -> ()"
)
_library.define(
    "append(Tensor state, Tensor k_rope, Tensor(a!) value_pages, Tensor(b!) rope_pages, Tensor(c!)? scales,"
    " Tensor slots, Tensor? positions, Tensor? cos, Tensor? sin, str impl) -> ()"
)
_library.define("absorb(Tensor q, Tensor maps, str impl) -> Tensor")
_library.define("expand(Tensor values, Tensor k_rope, Tensor maps, str impl) -> (Tensor, Tensor)")


def attend(call: Call, work: Work | None, impl: str | None) -> None:
    """`dispatch.attend` as one node; so are those below."""
    planned: tuple = ([], 0, None, None, None)
    if work is not None:
        planned = list(work.config), work.split_tiles, work.schedule, work.part_out, work.part_lse
    torch.ops.gva.paged_attention(
        call.q_absorbed, call.q_rope, *call.pages, *call.batch, call.scale, call.out, call.lse, *planned, impl or ""
    )


def append(
    state: Tensor, k_rope: Tensor, pages: Pages, slots: Tensor, rotation: Rotation | None, impl: str | None
) -> None:
    torch.ops.gva.append(state, k_rope, *pages, slots, *(rotation or (None,) * 3), impl or "")


def absorb(q: Tensor, maps: Tensor, impl: str | None) -> Tensor:
    return torch.ops.gva.absorb(q, maps, impl or "")


def expand(values: Tensor, k_rope: Tensor, maps: Tensor, impl: str | None) -> tuple[Tensor, Tensor]:
    return torch.ops.gva.expand(values, k_rope, maps, impl or "")


def _attend(q_absorbed, q_rope, *others):
    pages, batch, (scale, out, lse) = Pages(*others[:3]), Batch(*others[3:7]), others[7:10]
    config, split_tiles, schedule, part_out, part_lse, impl = others[10:]
    work = None if schedule is None else Work(Config(*config), split_tiles, schedule, part_out, part_lse)
    dispatch.attend(Call(q_absorbed, q_rope, pages, batch, scale, out, lse), work, impl or None)


def _append(state, k_rope, values, rope, scales, slots, positions, cos, sin, impl):
    rotation = None if cos is None else Rotation(positions, cos, sin)
    dispatch.append(state, k_rope, Pages(values, rope, scales), slots, rotation, impl or None)


def _absorb(q, maps, impl):
    return dispatch.absorb(q, maps, impl or None)


def _absorbed_shape(q, maps, impl):
    return q.new_empty(*q.shape[:2], maps.shape[2])


def _expand(values, k_rope, maps, impl):
    B, T = values.shape[:2]
    keys, repeated = dispatch.expand(values.flatten(0, 1), k_rope.flatten(0, 1), maps, impl=impl or None)
    return keys.unflatten(0, (B, T)), repeated.unflatten(0, (B, T))


def _expanded_shapes(values, k_rope, maps, impl):
    B, T, _, d_h = values.shape
    H, d_n, _ = maps.shape
    return values.new_empty(B, T, H, d_n + k_rope.shape[2]), values.new_empty(B, T, H, d_h)


def _on_its_device(op):
    """Triton launches on the current device, wherever the tensors are."""

    def run(first, *others):
        with torch.cuda.device_of(first):
            return op(first, *others)

    return run


def _nothing(*arguments):
    """What an op that writes into its arguments returns."""


for _name, _op, _fake in (
    ("paged_attention", _attend, _nothing), ("append", _append, _nothing), ("absorb", _absorb, _absorbed_shape),
    ("expand", _expand, _expanded_shapes),
):  # fmt: skip
    _library.impl(_name, _on_its_device(_op), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gva::{_name}", _fake, lib=_library)
