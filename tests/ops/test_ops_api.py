"""Errors name the argument, its value and what is allowed; imports stay light; torch.compile sees one node."""

import subprocess
import sys

import pytest
import torch
from ops_cases import make_case, needs_triton

from gva import ops


@pytest.mark.parametrize("name", ["sliding_window", "sinks", "softcap", "tree_mask"])
def test_what_is_not_supported_is_refused_by_name(name):
    case = make_case([4])
    with pytest.raises(NotImplementedError, match=name):
        ops.paged_attention(*case.args, **{name: 1})
    ops.paged_attention(*case.args, **{name: None})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"q_rope": torch.zeros(1, 16, 8, dtype=torch.bfloat16)}, r"rope_pages: got shape .* need \["),
        ({"q_rope": torch.zeros(1, 16, 16)}, "q_rope: got torch.float32, allowed torch.bfloat16"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int64)}, "seq_lens: got torch.int64, allowed torch.int32"),
        ({"block_table": torch.zeros(1, 2)}, "block_table: got torch.float32"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, r"cu_seqlens_q: got shape \(3,\), need \[2\]"),
        ({"max_seqlen_q": 0}, "max_seqlen_q=0"),
        ({"scale": 0.0}, "scale=0.0: must be positive"),
        ({"value_pages": torch.zeros(4, 16, 3, 64, dtype=torch.bfloat16)}, "H=16 heads are not a multiple of the G=3"),
    ],
)
def test_bad_arguments(change, match):
    case = make_case([4])
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(ValueError, match=match):
        ops.paged_attention(*case.args)


def test_uniform_queries_must_fill_the_batch():
    case = make_case([4, 4])
    with pytest.raises(ValueError, match="N = B \\* max_seqlen_q = 4"):
        ops.paged_attention(*case.args[:6], None, 2, case.scale)


def test_decode_takes_up_to_sixteen_queries():
    case = make_case([20], queries=17)
    with pytest.raises(ValueError, match="S=17 new tokens, allowed 1 to 16"):
        ops.paged_decode(case.q_absorbed[None], case.q_rope[None], *case.args[2:6], case.scale)


def test_fp8_needs_scales_and_others_refuse_them():
    case = make_case([4], fp8=True)
    with pytest.raises(ValueError, match="value_scales: needed with"):
        ops.paged_attention(*case.args)
    plain = make_case([4])
    with pytest.raises(ValueError, match="value_scales: only for"):
        ops.paged_attention(*plain.args, value_scales=torch.ones(4, 16, 4))


def test_an_unknown_implementation_is_named():
    case = make_case([4])
    with pytest.raises(ValueError, match="impl='cudnn': allowed are None, 'reference', 'triton'"):
        ops.paged_attention(*case.args, impl="cudnn")


def test_triton_says_what_is_missing(monkeypatch):
    case = make_case([4])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r"impl='triton' needs .*; impl='reference' runs anywhere"):
        ops.paged_attention(*case.args, impl="triton")


def test_gradients_are_refused():
    case = make_case([4], dtype=torch.float32)
    case.q_absorbed.requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        ops.paged_attention(*case.args)
    with torch.no_grad():
        ops.paged_attention(*case.args)


def test_append_wants_all_of_the_rotation():
    case = make_case([4])
    new = (torch.zeros(1, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="give all three or none; got only positions"):
        ops.append(*new, case.value_pages, case.rope_pages, torch.zeros(1, dtype=torch.int64),
                   positions=torch.zeros(1, dtype=torch.int64))  # fmt: skip


def test_importing_loads_torch_alone():
    code = (
        "import sys, gva.ops\n"
        "print([m for m in ('triton', 'transformers', 'vllm', 'datasets', 'matplotlib') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.compiles
def test_compiles_as_one_graph():
    case = make_case([9, 20], poison=False)
    assert_compiles(case, lambda *q: ops.paged_attention(*q, *case.args[2:], impl="reference", return_lse=True))


@pytest.mark.compiles
@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="test_ops_gpu.py compiles it there")
def test_compiles_under_a_plan():
    case = make_case([9, 20], poison=False)
    plan = ops.plan_decode(case.seq_lens, H=16, G=4, d_h=64, d_r=16, page=16, dtype=torch.bfloat16)
    rest = (*case.args[2:6], None, 1, case.scale)
    assert_compiles(case, lambda *q: ops.paged_attention(*q, *rest, impl="triton", plan=plan, return_lse=True))


def assert_compiles(case, attend):
    def step(q_absorbed, q_rope):
        out, lse = attend(q_absorbed, q_rope)
        return out * 2, lse

    want = step(case.q_absorbed, case.q_rope)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(case.q_absorbed, case.q_rope)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_ops_keep_their_promises_to_torch():
    case = make_case([9, 20], poison=False)
    out, lse = torch.zeros_like(case.q_absorbed), torch.zeros(2, 16)
    torch.library.opcheck(
        torch.ops.gva.paged_attention.default,
        (*case.args[:4], None, *case.args[4:], out, lse, [], 0, None, None, None, "reference"),
        test_utils=("test_schema", "test_faketensor"),
    )
