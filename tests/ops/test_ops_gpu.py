"""What only a GPU can show: graphs, compilation, large pools, long sequences, the full matrix of shapes."""

import pytest
import torch
from ops_cases import assert_close, make_case, needs_triton

from gva import ops

pytestmark = [
    pytest.mark.gpu,
    needs_triton,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def decode(case, **options):
    """The uniform call, S = max_seqlen_q."""
    return ops.paged_attention(
        *case.args[:6], None, case.max_seqlen_q, case.scale, value_scales=case.value_scales, impl="triton",
        return_lse=True, **options)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("d_h", [32, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize(("R", "S"), [(1, 1), (4, 1), (8, 1), (4, 4), (3, 8), (64, 1)])
def test_matrix(dtype, d_h, R, S):
    case = make_case([2000, 0, 17, 700, 1], queries=S, G=3, R=R, d_h=d_h, dtype=dtype, page=64, device="cuda")
    assert_close(*decode(case), case)


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("layout", ["separate", "row"])
@pytest.mark.parametrize("d_r", [8, 32, 64])
def test_pages(page, layout, d_r):
    case = make_case([2000, 0, 17, 4096], d_r=d_r, page=page, layout=layout, device="cuda")
    assert_close(*decode(case), case)


@pytest.mark.parametrize("d_h", [64, 96, 128])
@pytest.mark.parametrize("S", [1, 4, 8])
def test_fp8(d_h, S):
    case = make_case([2000, 0, 17, 4096], queries=S, d_h=d_h, fp8=True, page=64, device="cuda")
    assert_close(*decode(case), case)


def test_long_sequences():
    case = make_case([131072, 1, 40000], page=64, device="cuda")
    assert_close(*decode(case), case)


def test_chunked_prefill():
    case = make_case([700, 300, 5000, 64], queries=[512, 1, 200, 64], page=64, device="cuda")
    assert_close(*ops.paged_attention(*case.args, impl="triton", return_lse=True), case)


def test_captured_at_one_set_of_lengths_replayed_at_another():
    case = make_case([3000, 900, 2000, 4000], page=64, poison=False, device="cuda")
    lens = case.seq_lens.clone()
    case.seq_lens.fill_(1)
    plan = ops.plan_decode(case.seq_lens, H=16, G=4, d_h=64, d_r=16, page=64, dtype=torch.bfloat16)
    out, lse = decode(case, plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(case.seq_lens)
        out, lse = decode(case, plan=plan)
        unplanned, _ = decode(case)
    for new in (lens, lens // 3, torch.zeros_like(lens)):
        case.seq_lens.copy_(new)
        graph.replay()
        assert_close(out, lse, case)
        assert torch.equal(out, unplanned)


@pytest.mark.compiles
@pytest.mark.parametrize("planned", [False, True], ids=["alone", "planned"])
def test_compiles_as_one_graph(planned):
    case = make_case([300, 20], page=64, device="cuda")
    shape = {"H": 16, "G": 4, "d_h": 64, "d_r": 16, "page": 64, "dtype": torch.bfloat16}
    plan = ops.plan_decode(case.seq_lens, **shape) if planned else None

    def step(q_absorbed, q_rope):
        return ops.paged_attention(
            q_absorbed * 1, q_rope, *case.args[2:6], None, 1, case.scale, return_lse=True, plan=plan
        )

    out, lse = torch.compile(step, fullgraph=True)(case.q_absorbed, case.q_rope)
    assert_close(out, lse, case)


def test_offsets_beyond_two_to_the_31():
    G, d_h, page = 8, 128, 64
    P = 2**31 // (G * d_h * page) + 16
    values = torch.zeros(P, page, G, d_h, dtype=torch.bfloat16, device="cuda")
    k_rope = torch.zeros(P, page, 16, dtype=torch.bfloat16, device="cuda")
    small = make_case([130, 200], G=G, R=2, d_h=d_h, page=page, device="cuda", poison=False)
    far = torch.arange(P - small.value_pages.shape[0], P, device="cuda", dtype=torch.int32)
    values[far.long()], k_rope[far.long()] = small.value_pages, small.rope_pages
    table = far[small.block_table.clamp(max=small.value_pages.shape[0] - 1).long()]
    out, lse = ops.paged_attention(
        small.q_absorbed, small.q_rope, values, k_rope, table, small.seq_lens, None, 1, small.scale, return_lse=True
    )
    assert_close(out, lse, small)


def test_the_order_of_sequences_does_not_matter_with_a_fixed_split():
    case = make_case([3000, 0, 17, 900, 64, 2048], page=64, device="cuda")
    shape = {
        "H": 16,
        "G": 4,
        "d_h": 64,
        "d_r": 16,
        "page": 64,
        "dtype": torch.bfloat16,
        "split_tokens": 512,
        "max_tokens": 4096,
    }
    out, lse = decode(case, plan=ops.plan_decode(case.seq_lens, **shape))
    assert_close(out, lse, case)
    order = torch.tensor([4, 2, 0, 5, 1, 3], device="cuda")
    for name in ("q_absorbed", "q_rope", "block_table", "seq_lens"):
        setattr(case, name, getattr(case, name)[order].contiguous())
    again, _ = decode(case, plan=ops.plan_decode(case.seq_lens, **shape))
    assert torch.equal(again, out[order])


def test_the_same_call_twice_gives_the_same_bits():
    case = make_case([30000, 5000, 64], page=64, device="cuda")
    assert torch.equal(decode(case)[0], decode(case)[0])
