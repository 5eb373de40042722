"""The public operations: they validate, pick an implementation, and cross the torch.library boundary once.

    score(i, h, t) = (q_absorbed[i, h] . v[t, h // R] + q_rope[i, h] . k_rope[t]) * scale
    out[i, h]      = sum_t softmax(score)[t] v[t, h // R]

Absorbed MLA decode is the case G = 1, d_h = latent width.
"""

from __future__ import annotations

import torch

from . import library, reference
from .backend import FP8
from .call import Batch, Call, Pages, Rotation, Shape
from .plan import DecodePlan

MAX_DECODE_QUERIES = 16
REFUSED = ("sliding_window", "window_size", "sinks", "soft_cap", "softcap", "tree_mask", "alibi_slopes")


def _refuse(options: dict) -> None:
    for name, value in options.items():
        if name not in REFUSED:
            raise TypeError(f"{name}: no such argument")
        if value is not None:
            raise NotImplementedError(
                f"{name}={value!r}: gva.ops computes plain causal attention only; allowed is None"
            )


def _check(name: str, tensor: torch.Tensor, shape: tuple, dtypes: tuple, device: torch.device) -> None:
    """Shape entries that are strings are free."""
    good = tensor.dim() == len(shape) and all(
        isinstance(want, str) or got == want for got, want in zip(tensor.shape, shape, strict=True)
    )
    if not good:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, need [{', '.join(str(s) for s in shape)}]")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: got {tensor.dtype}, allowed {', '.join(str(d) for d in dtypes)}")
    if tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device}, the queries are on {device}")


def _check_pages(pages: Pages, G: int, d_h: int, d_r: int, dtype: torch.dtype, device: torch.device) -> None:
    values, k_rope, scales = pages
    fp8 = values.dtype == FP8
    P, page = values.shape[:2]
    _check("value_pages", values, (P, page, G, d_h), (dtype, FP8), device)
    rope_dtype = torch.bfloat16 if fp8 and dtype != torch.float64 else dtype
    _check("rope_pages", k_rope, (P, page, d_r), (rope_dtype,), device)
    for name, tensor in (("value_pages", values), ("rope_pages", k_rope)):
        _check_adjacent(name, tensor)
    if fp8 != (scales is not None):
        raise ValueError(f"value_scales: {'needed with' if fp8 else 'only for'} float8_e4m3fn value_pages")
    if fp8 and (d_h % 2 or any(stride % 2 for stride in values.stride()[:3])):
        raise ValueError(f"value_pages: d_h={d_h}, strides {values.stride()}: fp8 needs even ones")
    if scales is not None:
        _check("value_scales", scales, (P, page, G), (torch.float32,), device)


def _check_adjacent(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name}: last stride is {tensor.stride(-1)}, the last dimension must be contiguous")


def _refuse_gradient(name: str, *tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(f"{name}: requires grad, and this op has no backward; call it under torch.no_grad()")


def _adjacent(tensor: torch.Tensor) -> torch.Tensor:
    """With its last dimension contiguous, as kernels read it."""
    return tensor if tensor.dim() == 0 or tensor.stride(-1) == 1 else tensor.contiguous()


def _check_call(call: Call) -> None:
    (N, H, d_h), device, dtype = call.q_absorbed.shape, call.q_absorbed.device, call.q_absorbed.dtype
    block_table, seq_lens, cu_seqlens_q, max_seqlen_q = call.batch
    G, d_r, B = call.pages.values.shape[2], call.q_rope.shape[-1], block_table.shape[0]
    if G == 0 or H % G:
        raise ValueError(f"q_absorbed: H={H} heads are not a multiple of the G={G} groups of value_pages")
    if not call.scale > 0:
        raise ValueError(f"scale={call.scale}: must be positive")
    if max_seqlen_q < 1:
        raise ValueError(f"max_seqlen_q={max_seqlen_q}: must be at least 1")
    _check("q_rope", call.q_rope, (N, H, d_r), (dtype,), device)
    _check_pages(call.pages, G, d_h, d_r, dtype, device)
    _check("block_table", block_table, (B, "max_pages"), (torch.int32,), device)
    _check("seq_lens", seq_lens, (B,), (torch.int32,), device)
    if cu_seqlens_q is not None:
        _check("cu_seqlens_q", cu_seqlens_q, (B + 1,), (torch.int32,), device)
    elif B * max_seqlen_q != N:
        raise ValueError(f"cu_seqlens_q=None: needs N = B * max_seqlen_q = {B * max_seqlen_q} queries, got {N}")
    _refuse_gradient("q_absorbed", call.q_absorbed, call.q_rope)
    _check("out", call.out, (N, H, d_h), (dtype,), device)
    _check_adjacent("out", call.out)


def paged_attention(
    q_absorbed: torch.Tensor,
    q_rope: torch.Tensor,
    value_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    scale: float,
    *,
    value_scales: torch.Tensor | None = None,
    impl: str | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    plan: DecodePlan | None = None,
    **refused,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the newest tokens of each sequence to its whole cache, they included.

    q_absorbed    [N, H, d_h]  queries after absorption, all sequences' query tokens one after another
    q_rope        [N, H, d_r]
    value_pages   [P, page, G, d_h]  any strides, last dimension contiguous; float8_e4m3fn with `value_scales`
    rope_pages    [P, page, d_r]     may be a slice of the same rows; bfloat16 beside fp8 values
    block_table   [B, max_pages] int32; entries past a sequence's pages may hold any number
    seq_lens      [B] int32, counting the new tokens; 0 allowed; rows past the length may hold anything, NaN included
    cu_seqlens_q  [B+1] int32, or None: every sequence has max_seqlen_q queries
    scale         1/sqrt(d_n + d_r), the width of the score before absorption
    value_scales  [P, page, G] float32: value = e4m3 * scale
    plan          from `plan_decode`, updated for these lengths; without one the op plans for itself, never syncing

    Query i of the S of a sequence sees positions <= seq_len - S + i. Returns out [N, H, d_h], and with `return_lse`
    the natural-log LSE [N, H] float32 of the scaled scores; a row that sees nothing gives zeros and -inf.
    """
    _refuse(refused)
    if q_absorbed.dim() != 3 or value_pages.dim() != 4:
        raise ValueError(
            f"q_absorbed, value_pages: got {q_absorbed.dim()} and {value_pages.dim()} dimensions, need "
            "[N, H, d_h] and [P, page, G, d_h]"
        )
    dtype, device = q_absorbed.dtype, q_absorbed.device
    if out is None:
        out = torch.empty(q_absorbed.shape, dtype=dtype, device=device)
    lse = None
    if return_lse:
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        lse = torch.empty(q_absorbed.shape[:2], dtype=lse_dtype, device=device)
    starts = None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
    batch = Batch(_adjacent(block_table), seq_lens.contiguous(), starts, max_seqlen_q)
    pages = Pages(value_pages, rope_pages, value_scales)
    call = Call(_adjacent(q_absorbed), _adjacent(q_rope), pages, batch, scale, out, lse)
    _check_call(call)
    if plan is not None:
        plan.check(Shape.of(call), cu_seqlens_q is None)
    library.attend(call, plan, impl)
    return out if lse is None else (out, lse)


def paged_decode(
    q_absorbed: torch.Tensor,
    q_rope: torch.Tensor,
    value_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    **options,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention` with the same S = 1 to 16 new tokens in every sequence.

    q_absorbed [B, S, H, d_h], q_rope [B, S, H, d_r]; returns out [B, S, H, d_h] and, if asked, LSE [B, S, H].
    """
    if q_absorbed.dim() != 4:
        raise ValueError(f"q_absorbed: got shape {tuple(q_absorbed.shape)}, need [B, S, H, d_h]")
    B, S, H, d_h = q_absorbed.shape
    if not 1 <= S <= MAX_DECODE_QUERIES:
        raise ValueError(f"q_absorbed: S={S} new tokens, allowed 1 to {MAX_DECODE_QUERIES}; more: paged_attention")
    _check("q_rope", q_rope, (B, S, H, "d_r"), (q_absorbed.dtype,), q_absorbed.device)
    out = options.pop("out", None)
    if out is not None:
        _check("out", out, (B, S, H, d_h), (q_absorbed.dtype,), q_absorbed.device)
    result = paged_attention(
        q_absorbed.flatten(0, 1),
        q_rope.flatten(0, 1),
        value_pages,
        rope_pages,
        block_table,
        seq_lens,
        None,
        S,
        scale,
        out=None if out is None else out.view(B * S, H, d_h),
        **options,
    )
    if isinstance(result, tuple):
        return result[0].view(B, S, H, d_h), result[1].view(B, S, H)
    return result.view(B, S, H, d_h)


def append(
    values: torch.Tensor,
    k_rope: torch.Tensor,
    value_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Writes new rows into pages, in place.

    values        [N, G, d_h]; quantised to e4m3 where value_pages is fp8, one scale per token and group
    k_rope        [N, d_r], rotated here if `positions` [N], `cos` and `sin` [max_position, d_r/2] are given:
                  pairs are (i, i + d_r/2), arithmetic in float32
    slots         [N] int32 or int64: page id * page + row in the page; negative: a padding token, nothing is written
    """
    if values.dim() != 3 or value_pages.dim() != 4:
        raise ValueError(
            f"values, value_pages: got {values.dim()} and {value_pages.dim()} dimensions, need "
            "[N, G, d_h] and [P, page, G, d_h]"
        )
    (N, G, d_h), device, dtype, d_r = values.shape, values.device, values.dtype, k_rope.shape[-1]
    pages, rotation = Pages(value_pages, rope_pages, value_scales), None
    if d_r % 2:
        raise ValueError(f"k_rope: d_r={d_r}, must be even")
    _check("k_rope", k_rope, (N, d_r), (dtype,), device)
    _check_pages(pages, G, d_h, d_r, dtype, device)
    _check("slots", slots, (N,), (torch.int32, torch.int64), device)
    given = [name for name, t in (("positions", positions), ("cos", cos), ("sin", sin)) if t is not None]
    if len(given) not in (0, 3):
        raise ValueError(f"positions, cos, sin: give all three or none; got only {', '.join(given)}")
    if cos is not None and sin is not None and positions is not None:
        _check("positions", positions, (N,), (torch.int32, torch.int64), device)
        _check("cos", cos, ("max_position", d_r // 2), (torch.float32, torch.float64, dtype), device)
        _check("sin", sin, (cos.shape[0], d_r // 2), (cos.dtype,), device)
        if cos.stride() != sin.stride() or cos.stride(1) != 1:
            raise ValueError(f"cos, sin: strides {cos.stride()}, {sin.stride()}; must agree, last dimension contiguous")
        rotation = Rotation(positions, cos, sin)
    library.append(_adjacent(values), _adjacent(k_rope), pages, slots, rotation, impl)


def absorb(q: torch.Tensor, maps: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """q_h M_h^T [..., H, d_h], contiguous, no gradient: queries for grouped values as they are cached.

    q     [..., H, d_n]    content alone; or wider, content first: what stands behind it is not read
    maps  [H, d_n, d_h]    M_h^T: the content key of head h is v_g(h) M_h
    """
    if q.dim() < 2 or maps.dim() != 3 or q.shape[-2] != maps.shape[0] or q.shape[-1] < maps.shape[1]:
        raise ValueError(
            f"q {tuple(q.shape)}, maps {tuple(maps.shape)}: need [..., H, d_n], or wider, and [H, d_n, d_h]"
        )
    _check("maps", maps, ("H", "d_n", "d_h"), (q.dtype,), q.device)
    _refuse_gradient("q", q, maps)
    absorbed = library.absorb(
        _adjacent(q).flatten(0, -3) if q.dim() > 2 else _adjacent(q)[None], maps.contiguous(), impl
    )
    return absorbed.view(*q.shape[:-1], maps.shape[2])


def expand(
    values: torch.Tensor, k_rope: torch.Tensor, maps: torch.Tensor, *, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The expanded form's keys [B, T, H, d_n + d_r] and values [B, T, H, d_h], one of each per head, for kernels that
    want as many of one as of the other; contiguous, no gradient.

    values  [B, T, G, d_h]   any strides over B*T and G, last dimension contiguous
    k_rope  [B, T, d_r]      rotated, shared by all heads
    maps    [H, d_n, d_h]    M_h^T: the content key of head h is v_g(h) M_h
    """
    (G, d_h), H = values.shape[2:], maps.shape[0]
    if maps.shape[2] != d_h or H % G or k_rope.shape[:2] != values.shape[:2]:
        raise ValueError(
            f"values {tuple(values.shape)}, k_rope {tuple(k_rope.shape)}, maps {tuple(maps.shape)}: "
            "need [B, T, G, d_h], [B, T, d_r] and [H, d_n, d_h] with H a multiple of G"
        )
    return library.expand(values, k_rope, maps, impl)


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of positions from the results over each: out [..., d_h], natural LSE [...].

    A side that saw nothing (zeros, -inf) leaves the other unchanged. Elementwise torch: torch.compile fuses it.
    """
    device = out_a.device
    _check("lse_a", lse_a, tuple(out_a.shape[:-1]), (torch.float32, torch.float64), device)
    _check("out_b", out_b, tuple(out_a.shape), (out_a.dtype,), device)
    _check("lse_b", lse_b, tuple(out_a.shape[:-1]), (lse_a.dtype,), device)
    return reference.merge_states(out_a, lse_a, out_b, lse_b)
