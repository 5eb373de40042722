"""The Triton kernels, on a GPU or in Triton's interpreter, against float64 with the derived tolerance."""

import pytest
import torch
from ops_cases import assert_close, make_case, needs_triton

from gva import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [needs_triton, *([pytest.mark.gpu] if DEVICE == "cuda" else [])]
LENS = [37, 0, 130, 1, 64]
SMALL = {"G": 2, "R": 2, "d_h": 32, "d_r": 8}


def run(case, plan=None, uniform=False, **options):
    cu = None if uniform else case.cu_seqlens_q
    return ops.paged_attention(
        *case.args[:6], cu, case.max_seqlen_q, case.scale, value_scales=case.value_scales, impl="triton",
        return_lse=True, plan=plan, **options)  # fmt: skip


def plan_for(case, **options):
    _N, H, d_h = case.q_absorbed.shape
    page, G = case.value_pages.shape[1:3]
    return ops.plan_decode(
        case.seq_lens, H=H, G=G, d_h=d_h, d_r=case.q_rope.shape[2], page=page, dtype=case.q_absorbed.dtype,
        value_dtype=case.value_pages.dtype, max_seqlen_q=case.max_seqlen_q, **options)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("layout", ["separate", "row"])
def test_dtypes_and_layouts(dtype, layout):
    case = make_case(LENS, dtype=dtype, layout=layout, device=DEVICE)
    assert_close(*run(case), case)


@pytest.mark.parametrize(("G", "R"), [(1, 1), (1, 64), (3, 5), (5, 3), (2, 8), (7, 1), (8, 2)])
def test_any_number_of_groups_and_heads(G, R):
    case = make_case([33, 0, 70], G=G, R=R, d_h=32, device=DEVICE)
    assert_close(*run(case), case)


@pytest.mark.parametrize("d_h", [32, 64, 80, 96, 128, 256, 512])
def test_value_widths(d_h):
    case = make_case([33, 70], G=2, R=2, d_h=d_h, device=DEVICE)
    assert_close(*run(case), case)


@pytest.mark.parametrize("d_r", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("layout", ["separate", "row"])
def test_positional_widths(d_r, layout):
    case = make_case([33, 70], G=3, R=2, d_h=32, d_r=d_r, layout=layout, device=DEVICE)
    assert_close(*run(case), case)


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128, 256])
def test_page_sizes(page):
    case = make_case([3 * page + 5, 0, 2 * page, 1] if page > 1 else LENS, page=page, **SMALL, device=DEVICE)
    assert_close(*run(case), case)


@pytest.mark.parametrize(
    "queries", [1, 2, 5, 8, 16, [1, 16, 3, 1, 40], [0, 2, 0, 1, 64]], ids=["1", "2", "5", "8", "16", "mixed", "gaps"]
)
def test_several_queries(queries):
    case = make_case([37, 20, 130, 1, 64], queries=queries, **SMALL, device=DEVICE)
    assert_close(*run(case), case)


@pytest.mark.parametrize("S", [1, 4, 16])
def test_decode_is_the_uniform_case(S):
    case = make_case([37, 0, 130, 20], queries=S, **SMALL, device=DEVICE)
    shape = (4, S, 4)
    out, lse = ops.paged_decode(
        case.q_absorbed.view(*shape, 32), case.q_rope.view(*shape, 8), *case.args[2:6], case.scale, impl="triton",
        return_lse=True)  # fmt: skip
    assert_close(out.flatten(0, 1), lse.flatten(0, 1), case)


@pytest.mark.parametrize("S", [1, 4])
@pytest.mark.parametrize(("d_h", "dtype"), [(64, torch.bfloat16), (96, torch.bfloat16), (64, torch.float16),
                                            (32, torch.bfloat16)])  # fmt: skip
def test_fp8_values(S, d_h, dtype):
    case = make_case(LENS, queries=S, G=2, R=4, d_h=d_h, fp8=True, device=DEVICE)
    if dtype != torch.bfloat16:
        case.q_absorbed, case.q_rope = case.q_absorbed.to(dtype), case.q_rope.to(dtype)
    assert_close(*run(case), case)


@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_fp8_scales_of_any_size(size):
    """Weights are in half precision relative to the largest scale: tiny and huge values stay in range."""
    case = make_case([37, 100], G=2, R=4, fp8=True, poison=False, device=DEVICE)
    case.value_scales.mul_(size)
    case.q_absorbed = (case.q_absorbed.float() / size).to(torch.bfloat16)
    assert_close(*run(case), case)


def test_the_parts_of_long_sequences_are_merged():
    case = make_case([1500, 0, 37, 900], **SMALL, device=DEVICE)
    plan = plan_for(case, config=[16, 1, 16, 1, 1, 3, 3, 3])
    assert_close(*run(case, plan, uniform=True), case)


def test_a_plan_is_refilled_in_place():
    case = make_case([300, 8], **SMALL, device=DEVICE)
    plan = plan_for(case)
    before = plan.schedule.data_ptr()
    case.seq_lens.copy_(torch.tensor([5, 8], dtype=torch.int32))
    plan.update(case.seq_lens)
    assert plan.schedule.data_ptr() == before
    assert_close(*run(case, plan, uniform=True), case)


def test_a_fixed_split_does_not_depend_on_the_batch():
    case = make_case([700, 0, 37, 400, 64], **SMALL, device=DEVICE)
    together, lse = run(case, plan_for(case, split_tokens=256, max_tokens=1024), uniform=True)
    assert_close(together, lse, case)
    for b in range(5):
        alone = make_case([1], **SMALL, device=DEVICE)
        for name in ("q_absorbed", "q_rope", "block_table", "seq_lens"):
            setattr(alone, name, getattr(case, name)[b : b + 1])
        alone.value_pages, alone.rope_pages = case.value_pages, case.rope_pages
        out, lone_lse = run(alone, plan_for(alone, split_tokens=256, max_tokens=2048), uniform=True)
        assert torch.equal(out[0], together[b])
        assert torch.equal(lone_lse[0], lse[b])


def test_nor_does_the_merge_of_its_many_pieces():
    case = make_case([640] + [5] * 16, **SMALL, dtype=torch.float32, device=DEVICE)
    together, lse = run(case, plan_for(case, split_tokens=32, max_tokens=640), uniform=True)
    for name in ("q_absorbed", "q_rope", "block_table", "seq_lens"):
        setattr(case, name, getattr(case, name)[:1])
    alone, lone_lse = run(case, plan_for(case, split_tokens=32, max_tokens=640), uniform=True)
    assert torch.equal(alone[0], together[0])
    assert torch.equal(lone_lse[0], lse[0])


def test_queries_that_are_almost_nothing():
    case = make_case([100, 3], fp8=True, **SMALL, device=DEVICE)
    case.q_absorbed.mul_(1e-38)
    case.q_rope.mul_(8)
    assert_close(*run(case), case)


def test_strided_inputs_and_output():
    case = make_case(LENS, **SMALL, device=DEVICE)
    wide = torch.stack([case.q_absorbed, case.q_absorbed], 2)
    case.q_absorbed = wide[:, :, 1]
    case.seq_lens = torch.stack([case.seq_lens, case.seq_lens * 2], 1)[:, 0]
    case.cu_seqlens_q = torch.stack([case.cu_seqlens_q, case.cu_seqlens_q * 2], 1)[:, 0]
    case.block_table = case.block_table.t().contiguous().t()
    out = torch.full((5, 4, 40), float("nan"), dtype=torch.bfloat16, device=DEVICE)[..., :32]
    got, lse = run(case, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert_close(got, lse, case)
    assert_close(*run(case, plan_for(case), uniform=True), case)


def test_no_sequences():
    case = make_case([4], **SMALL, device=DEVICE)
    empty = (case.q_absorbed[:0], case.q_rope[:0], case.value_pages, case.rope_pages, case.block_table[:0],
             case.seq_lens[:0], None, 1, case.scale)  # fmt: skip
    assert ops.paged_attention(*empty, impl="triton").shape == (0, 4, 32)
