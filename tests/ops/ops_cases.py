"""Inputs, oracle and tolerance shared by the tests of gva.ops."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import pytest
import torch

from gva.ops import packed_row_bytes, packed_views, paged_attention, reference

HUGE_PAGE = 2_147_480_000
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@dataclass
class Case:
    """Arguments of paged_attention; `dict(case)`-like access through `args`."""

    q_absorbed: torch.Tensor
    q_rope: torch.Tensor
    value_pages: torch.Tensor
    rope_pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    scale: float
    value_scales: torch.Tensor | None = None

    @property
    def args(self) -> tuple:
        return (self.q_absorbed, self.q_rope, self.value_pages, self.rope_pages, self.block_table, self.seq_lens,
                self.cu_seqlens_q, self.max_seqlen_q, self.scale)  # fmt: skip


def make_case(
    lens: list[int], *, queries: list[int] | int = 1, G: int = 4, R: int = 4, d_h: int = 64, d_r: int = 16,
    page: int = 16, dtype: torch.dtype = torch.bfloat16, layout: str = "separate", fp8: bool = False,
    poison: bool = True, device: str = "cpu", seed: int = 0, spare_pages: int = 3,
) -> Case:  # fmt: skip
    """Permuted pages; NaN in unused pages and past the last token; huge ids in unused table entries."""
    rng = torch.Generator().manual_seed(seed)
    B, H = len(lens), G * R
    queries = [queries] * B if isinstance(queries, int) else queries
    N = sum(queries)
    max_pages = max([-(-n // page) for n in lens] + [1]) + 1
    P = sum(-(-n // page) for n in lens) + spare_pages
    order = torch.randperm(P, generator=rng).tolist()
    table = torch.full((B, max_pages), HUGE_PAGE if poison else 0, dtype=torch.int32)
    values = torch.randn(P, page, G, d_h, generator=rng)
    k_rope = torch.randn(P, page, d_r, generator=rng)
    held = torch.zeros(P, page, dtype=torch.bool)
    for b, n in enumerate(lens):
        for i in range(-(-n // page)):
            table[b, i] = order.pop()
            held[table[b, i], : min(page, n - i * page)] = True
    scales = None
    if fp8:
        rows = torch.zeros(P, page, packed_row_bytes(G, d_h, d_r), dtype=torch.uint8)
        v8, r16, s32 = packed_views(rows, G, d_h, d_r)
        quantised, scale = reference.quantise(values * (0.1 + torch.rand(P, page, G, 1, generator=rng)))
        v8.copy_(quantised), r16.copy_(k_rope), s32.copy_(scale)
        if poison:
            rows[~held] = 255  # NaN in e4m3, in bfloat16 and in float32
        rows = rows.to(device)
        value_pages, rope_pages, scales = packed_views(rows, G, d_h, d_r)
    else:
        if poison:
            values[~held], k_rope[~held] = float("nan"), float("nan")
        if layout == "row":
            rows = torch.cat([values.flatten(2), k_rope], -1).to(dtype).to(device)
            value_pages = rows[..., : G * d_h].view(P, page, G, d_h)
            rope_pages = rows[..., G * d_h :]
        else:
            value_pages, rope_pages = values.to(dtype).to(device), k_rope.to(dtype).to(device)
    q = torch.randn(N, H, d_h, generator=rng).to(dtype).to(device)
    q_rope = torch.randn(N, H, d_r, generator=rng).to(dtype).to(device)
    cu = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    return Case(
        q, q_rope, value_pages, rope_pages, table.to(device), torch.tensor(lens, dtype=torch.int32).to(device),
        cu.to(device), max(queries), (d_h + d_r) ** -0.5, scales)  # fmt: skip


def eager(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in the dtype of the queries: output and LSE."""
    return paged_attention(*case.args, value_scales=case.value_scales, impl="reference", return_lse=True)


def oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float64 on the same rounded inputs (fp8: on the dequantised cache)."""
    values = case.value_pages.double()
    if case.value_scales is not None:
        values = values * case.value_scales.double()[..., None]
    exact = {"q_absorbed": case.q_absorbed.double(), "q_rope": case.q_rope.double(), "value_pages": values}
    return eager(replace(case, **exact, rope_pages=case.rope_pages.double(), value_scales=None))


def assert_close(out: torch.Tensor, lse: torch.Tensor | None, case: Case) -> None:
    """Max error against float64 at most twice eager's in the same dtype and form, plus 2 eps of the largest value."""
    exact, exact_lse = oracle(case)
    rounded, rounded_lse = eager(case)
    eps = torch.finfo(case.q_absorbed.dtype).eps
    names = [("out", out, exact, rounded, eps)]
    if lse is not None:
        assert lse.dtype == torch.float32
        names.append(("lse", lse, exact_lse, rounded_lse, eps))
    for name, got, want, yardstick, eps in names:
        finite = torch.isfinite(want)
        assert torch.equal(torch.isneginf(got), torch.isneginf(want)), f"{name}: -inf pattern differs"
        assert torch.isfinite(got[finite]).all(), f"{name}: NaN or Inf where the oracle is finite"
        if not finite.any():
            continue
        error = torch.where(finite, (got.double() - want).abs(), 0)
        budget = torch.where(finite, (yardstick.double() - want).abs(), 0).max()
        budget = 2 * budget + 2 * eps * want[finite].abs().max()
        worst = error.max()
        where = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
        assert worst <= budget, f"{name}: error {worst:.3e} at {where}, budget {budget:.3e}"
