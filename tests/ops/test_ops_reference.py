"""The reference against a loop over sequences, heads and positions, and the identities that define the operations."""

import math

import pytest
import torch
from ops_cases import assert_close, eager, make_case, oracle

from gva import ops
from gva.ops import reference


def slow(case):
    """One dot product at a time, in float64."""
    N, H, d_h = case.q_absorbed.shape
    page, G = case.value_pages.shape[1:3]
    out = torch.zeros(N, H, d_h, dtype=torch.float64)
    lse = torch.full((N, H), -math.inf, dtype=torch.float64)
    starts = case.cu_seqlens_q.tolist()
    for b, length in enumerate(case.seq_lens.tolist()):
        S = starts[b + 1] - starts[b]
        at = [(int(case.block_table[b, t // page]), t % page) for t in range(length)]
        for i in range(S):
            seen = at[: max(0, length - S + i + 1)]
            for h in range(H):
                if not seen:
                    continue
                g = h // (H // G)
                v = torch.stack([case.value_pages[p, r, g] for p, r in seen]).double()
                k = torch.stack([case.rope_pages[p, r] for p, r in seen]).double()
                row = starts[b] + i
                score = (v @ case.q_absorbed[row, h].double() + k @ case.q_rope[row, h].double()) * case.scale
                out[row, h] = torch.softmax(score, 0) @ v
                lse[row, h] = torch.logsumexp(score, 0)
    return out, lse


@pytest.mark.parametrize("queries", [1, 3, [2, 1, 0, 4, 1]], ids=["one", "three", "ragged"])
def test_matches_the_definition(queries):
    case = make_case([7, 0, 12, 2, 33], queries=queries, G=2, R=3, d_h=8, d_r=4, page=4, dtype=torch.float64)
    out, lse = eager(case)
    want, want_lse = slow(case)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_a_row_that_sees_nothing_is_zero_with_lse_minus_infinity():
    case = make_case([0, 1], queries=[1, 3], dtype=torch.float32)
    out, lse = ops.paged_attention(*case.args, impl="reference", return_lse=True)
    assert (out[:3] == 0).all()
    assert torch.isneginf(lse[:3]).all()
    assert torch.isfinite(lse[3]).all()


def test_absorbed_is_expanded():
    """q~ . v with q~ = q M^T equals q . (v M): the identity that the whole package rests on."""
    d_h, d_n, d_r, G, R = 16, 12, 4, 2, 2
    case = make_case([9, 20], G=G, R=R, d_h=d_h, d_r=d_r, page=4, dtype=torch.float64)
    M = torch.randn(G * R, d_h, d_n, dtype=torch.float64)
    q_nope = torch.randn(2, G * R, d_n, dtype=torch.float64)
    case.q_absorbed = torch.einsum("nhe,hde->nhd", q_nope, M)
    out, _ = eager(case)
    for b, length in enumerate([9, 20]):
        pages = case.block_table[b, : -(-length // 4)].long()
        v = case.value_pages[pages].flatten(0, 1)[:length].repeat_interleave(R, 1)
        key = torch.cat(
            [
                torch.einsum("thd,hde->the", v, M),
                case.rope_pages[pages].flatten(0, 1)[:length, None].expand(-1, G * R, -1),
            ],
            -1,
        )
        q = torch.cat([q_nope[b], case.q_rope[b]], -1)
        weights = torch.softmax(torch.einsum("hd,thd->ht", q, key) * case.scale, -1)
        torch.testing.assert_close(out[b], torch.einsum("ht,thd->hd", weights, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_two_halves_is_attention_over_the_whole(dtype):
    case = make_case([64], dtype=dtype, page=16)
    halves = []
    for table in (case.block_table[:, :2], case.block_table[:, 2:4]):
        half = (*case.args[:4], table, torch.tensor([32], dtype=torch.int32), None, 1, case.scale)
        halves.append(ops.paged_attention(*half, return_lse=True))
    out, lse = ops.merge_states(*halves[0], *halves[1])
    assert_close(out, lse, case)
    nothing = (torch.zeros_like(out), torch.full_like(lse, -math.inf))
    same, same_lse = ops.merge_states(out, lse, *nothing)
    assert torch.equal(same, out)
    assert torch.equal(same_lse, lse)
    none, none_lse = ops.merge_states(*nothing, *nothing)
    assert (none == 0).all()
    assert torch.isneginf(none_lse).all()


def test_fp8_costs_what_e4m3_costs():
    """Error against the unquantised cache: three mantissa bits, no more."""
    torch.manual_seed(0)
    values = torch.randn(4, 16, 4, 64)
    quantised, scales = reference.quantise(values)
    back = quantised.float() * scales[..., None]
    assert (back - values).abs().max() <= values.abs().max() * 2**-4
    case = make_case([100, 37], fp8=True)
    out, lse = ops.paged_attention(*case.args, value_scales=case.value_scales, return_lse=True)
    assert_close(out, lse, case)


def test_quantising_zeros():
    quantised, scales = reference.quantise(torch.zeros(2, 8))
    assert (quantised.float() * scales[..., None] == 0).all()


def test_oracle_ignores_poison():
    case = make_case([5, 0, 17])
    assert torch.isfinite(oracle(case)[0]).all()
