"""The fast door does what the public operations do."""

import pytest
import torch
from ops_cases import make_case, needs_triton

from gva import ops
from gva.ops import fast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def new_tokens(N, G, d_h, d_r):
    return torch.randn(N, G, d_h, device=DEVICE).bfloat16(), torch.randn(N, d_r, device=DEVICE).bfloat16()


@needs_triton
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("S", [1, 3])
def test_attending_under_a_plan(S, fp8):
    case = make_case([37, 0, 130, 3], queries=S, G=2, R=2, d_h=32, d_r=8, fp8=fp8, layout="row", device=DEVICE)
    plan = ops.plan_decode(
        case.seq_lens, H=4, G=2, d_h=32, d_r=8, page=16, dtype=torch.bfloat16, value_dtype=case.value_pages.dtype,
        max_seqlen_q=S)  # fmt: skip
    want = ops.paged_attention(
        *case.args[:6], None, S, case.scale, value_scales=case.value_scales, impl="triton", plan=plan
    )
    pages, out = ops.Pages(case.value_pages, case.rope_pages, case.value_scales), torch.empty_like(case.q_absorbed)
    fast.attend(plan, case.q_absorbed, case.q_rope, pages, case.block_table, case.seq_lens, case.scale, out)
    assert torch.equal(out, want)


@pytest.mark.parametrize("S", [1, 3])
def test_attending_without_a_plan(S):
    case = make_case([37, 0, 130, 3], queries=S, layout="row", device=DEVICE)
    pages, out = ops.Pages(case.value_pages, case.rope_pages), torch.empty_like(case.q_absorbed)
    fast.attend(None, case.q_absorbed, case.q_rope, pages, case.block_table, case.seq_lens, case.scale, out)
    assert torch.equal(out, ops.paged_attention(*case.args[:6], None, S, case.scale))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_appending(fp8):
    G, d_h, d_r = 3, 32, 8
    rows = torch.zeros(2, 3, 4, ops.row_width(G, d_h, d_r, fp8), dtype=torch.uint8 if fp8 else torch.bfloat16)
    state, k_rope = new_tokens(3, G, d_h, d_r)
    slots = torch.tensor([7, -1, 2], device=DEVICE)
    checked, unchecked = (ops.row_views(half, G, d_h, d_r) for half in rows.to(DEVICE))
    ops.append(state, k_rope, *checked[:2], slots, value_scales=checked.scales)
    fast.append(state, k_rope, unchecked, slots)
    for want, got in zip(checked, unchecked, strict=True):
        assert got is None or torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(unchecked.k_rope.flatten(0, 1)[slots[[0, 2]]], k_rope[[0, 2]])


def test_expanding():
    values, k_rope = new_tokens(6, 2, 32, 8)
    maps = torch.randn(4, 24, 32, device=DEVICE).bfloat16()
    want = ops.expand(values[None], k_rope[None], maps)
    got = fast.expand(values, k_rope, maps)
    slots = torch.tensor([5, 0, 3], device=DEVICE)
    in_pages = fast.expand(values.unflatten(0, (2, 3)), k_rope.unflatten(0, (2, 3)), maps, slots)
    for there, here, paged in zip(want, got, in_pages, strict=True):
        assert torch.equal(here, there[0])
        torch.testing.assert_close(paged, here[slots])


def test_absorbing():
    """Scores of absorbed queries with values are those of queries with keys."""
    values, k_rope = (x.float() for x in new_tokens(6, 2, 32, 8))
    q, maps = torch.randn(5, 4, 32, device=DEVICE), torch.randn(4, 24, 32, device=DEVICE)
    keys, repeated = fast.expand(values, k_rope, maps)
    absorbed = fast.absorb(q, maps)
    assert absorbed.is_contiguous()
    expanded = torch.einsum("nhd,thd->nht", q[..., :24], keys[..., :24])
    torch.testing.assert_close(torch.einsum("nhd,thd->nht", absorbed, repeated), expanded, rtol=1e-4, atol=1e-4)
