"""Paged GVA attention in plain torch: the meaning of the operations, in any dtype, on any device, without a sync.

Arithmetic is done in the dtype of the queries with a softmax in float32 (float64 for float64), so that the same
function is the oracle (on float64 inputs) and the eager yardstick (on bfloat16 ones).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .call import Call, Pages, Rotation

E4M3_MAX = 448.0


def attend(call: Call) -> None:
    """Writes the output [N, H, d_h] and the natural-log LSE [N, H] of scaled scores, if `call.lse` is there."""
    out, lse = _attend(call)
    call.out.copy_(out)
    if call.lse is not None:
        call.lse.copy_(lse)


def _attend(call: Call) -> tuple[Tensor, Tensor]:
    (q_absorbed, q_rope), (value_pages, rope_pages, value_scales) = call[:2], call.pages
    block_table, seq_lens, cu_seqlens_q, max_seqlen_q = call.batch
    N, H, d_h = q_absorbed.shape
    page, G = value_pages.shape[1:3]
    B, max_pages = block_table.shape
    device, dtype = q_absorbed.device, q_absorbed.dtype
    high = torch.float64 if dtype == torch.float64 else torch.float32
    T = max_pages * page

    position = torch.arange(T, device=device)
    held = position < seq_lens[:, None]  # [B, T]
    used = torch.arange(max_pages, device=device) * page < seq_lens[:, None]
    pages = torch.where(used, block_table, 0).long()
    values = value_pages[pages].reshape(B, T, G, d_h)
    if value_scales is not None:
        scales = value_scales[pages].reshape(B, T, G, 1)
        values = (values.to(high) * scales.to(high)).to(dtype)
    k_rope = rope_pages[pages].reshape(B, T, -1).to(dtype)
    # Rows past the length may hold anything, NaN included: 0 * NaN would reach the output.
    values = torch.where(held[:, :, None, None], values.to(dtype), 0)
    k_rope = torch.where(held[:, :, None], k_rope, 0)

    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(B + 1, device=device) * max_seqlen_q
    first = cu_seqlens_q[:-1].long()
    count = cu_seqlens_q[1:].long() - first  # [B]
    query = torch.arange(max_seqlen_q, device=device)
    live = query < count[:, None]  # [B, S]
    row = torch.where(live, first[:, None] + query, 0)
    if N == 0:
        return q_absorbed.new_zeros(0, H, d_h), q_absorbed.new_zeros(0, H, dtype=high)
    q = q_absorbed[row].reshape(B, max_seqlen_q, G, H // G, d_h)
    scores = torch.einsum("bsgrd,btgd->bsgrt", q, values)
    scores = scores + torch.einsum("bshd,btd->bsht", q_rope[row], k_rope).reshape(scores.shape)
    newest = seq_lens[:, None] - count[:, None] + query  # [B, S] last position that a query sees
    seen = held[:, None, :] & (position <= newest[:, :, None])
    scores = (scores.to(high) * call.scale).masked_fill(~seen[:, :, None, None, :], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    out = torch.einsum("bsgrt,btgd->bsgrd", weights.to(dtype), values)

    # Padding queries are written to row N, which is cut off: no data-dependent shape, hence no sync.
    target = torch.where(live, row, N).reshape(-1)
    flat_out = q_absorbed.new_zeros(N + 1, H, d_h).index_copy_(0, target, out.reshape(-1, H, d_h))
    flat_lse = lse.new_full((N + 1, H), float("-inf")).index_copy_(0, target, lse.reshape(-1, H))
    return flat_out[:N], flat_lse[:N]


def rotate(k_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + d_r/2) of `k_rope` [N, d_r] by the angles of `cos`, `sin` [N, d_r/2], in float32."""
    high = torch.promote_types(k_rope.dtype, torch.float32)
    first, second = k_rope.to(high).chunk(2, -1)
    cos, sin = cos.to(high), sin.to(high)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(k_rope.dtype)


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """`values` [..., d_h] as e4m3 and its float32 scale [...]: the largest magnitude of a group becomes 448."""
    values = values.float()
    scales = values.abs().amax(-1) / E4M3_MAX
    divisor = torch.where(scales > 0, scales, 1.0)
    return (values / divisor[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def append(state: Tensor, k_rope: Tensor, pages: Pages, slots: Tensor, rotation: Rotation | None) -> None:
    """Writes rows in place; a negative slot is skipped, on a GPU by rewriting what the first real slot receives."""
    page = pages.values.shape[1]
    if rotation is not None:
        at = rotation.positions.clamp(min=0).long()
        k_rope = rotate(k_rope, rotation.cos[at], rotation.sin[at])
    if slots.numel() == 0:
        return
    real = slots >= 0
    if slots.is_cpu and not real.all():
        append(state[real], k_rope[real], pages, slots[real], None)
        return
    slots = slots.clamp(min=0).long()
    index, offset = slots // page, slots % page

    def write(pages: Tensor, rows: Tensor) -> None:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[pages.element_size()]
        target, rows = pages.view(bits), rows.to(pages.dtype).contiguous().view(bits)
        if slots.is_cpu:
            target[index, offset] = rows
            return
        # A skipped row takes the first real row's place and content: duplicates of one write, no sync.
        anchor = real.int().argmax()
        where = torch.where(real, torch.arange(len(slots), device=slots.device), anchor)
        keep = target[index[where], offset[where]]
        target[index[where], offset[where]] = torch.where(
            real.any().reshape((1,) * rows.dim()), rows[where], keep)  # fmt: skip

    if pages.scales is not None:
        state, scales = quantise(state)
        write(pages.scales, scales)
    write(pages.values, state)
    write(pages.k_rope, k_rope)


def absorb(q: Tensor, maps: Tensor) -> Tensor:
    return torch.bmm(q[..., : maps.shape[1]].transpose(0, 1), maps).transpose(0, 1).contiguous()


def expand(values: Tensor, k_rope: Tensor, maps: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if slots is not None:
        at = slots // values.shape[1], slots % values.shape[1]
        values, k_rope = values[at], k_rope[at]
    T, G, _ = values.shape
    H = maps.shape[0]
    k_nope = torch.einsum("tgd,grnd->tgrn", values, maps.unflatten(0, (G, -1))).flatten(1, 2)
    return torch.cat((k_nope, k_rope[:, None].expand(T, H, -1)), dim=-1), values.repeat_interleave(H // G, dim=1)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of positions, from the results over each."""
    high = torch.promote_types(out_a.dtype, torch.float32)
    lse = torch.logaddexp(lse_a.to(high), lse_b.to(high))
    safe = torch.where(lse == float("-inf"), 0.0, lse)
    weight_a, weight_b = torch.exp(lse_a - safe)[..., None], torch.exp(lse_b - safe)[..., None]
    return (out_a.to(high) * weight_a + out_b.to(high) * weight_b).to(out_a.dtype), lse.to(lse_a.dtype)
