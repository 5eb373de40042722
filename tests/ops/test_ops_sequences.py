"""Plain torch on a CPU, one sequence after another, against the float64 reference within the usual tolerance."""

import pytest
import torch
from ops_cases import assert_close, make_case, oracle

from gva import ops
from gva.ops import backend, reference


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """As on a machine that has none."""
    monkeypatch.setattr(backend, "missing_cpu", lambda *wanted: "a C compiler")


def attended(case):
    return ops.paged_attention(*case.args, value_scales=case.value_scales)


@pytest.mark.parametrize("queries", [1, 3, [2, 1, 0, 4, 1]], ids=["one", "three", "ragged"])
@pytest.mark.parametrize(
    ("dtype", "layout", "fp8"),
    [
        (torch.float32, "separate", False),
        (torch.float32, "row", False),
        (torch.bfloat16, "row", False),
        (torch.bfloat16, "row", True),
    ],
    ids=["float32", "rows", "bfloat16", "fp8"],
)
def test_equals_the_reference(dtype, layout, fp8, queries, monkeypatch):
    """Poisoned pages, lengths of none and of less than the queries."""
    cases = [
        make_case([37, 0, 12, 2, 65], queries=queries, dtype=dtype, layout=layout, fp8=fp8, **shape)
        for shape in ({}, {"G": 1, "R": 8, "d_h": 40, "d_r": 48}, {"R": 1, "page": 1})
    ]
    with monkeypatch.context() as patch:
        patch.setattr(reference, "attend", None)
        outs = [attended(case) for case in cases]
    for out, case in zip(outs, cases, strict=True):
        assert_close(out, None, case)


def test_what_was_gathered_before_leaves_nothing_behind():
    """Room that is kept between calls: a long sequence, then shorter ones of another shape and precision."""
    for case in (
        make_case([90], dtype=torch.float64),
        make_case([5, 60], G=2, dtype=torch.float32),
        make_case([9], dtype=torch.bfloat16, fp8=True),
        make_case([90], dtype=torch.float64),
    ):
        first = attended(case)
        assert torch.equal(attended(case), first)
        if case.q_absorbed.dtype == torch.float64:
            torch.testing.assert_close(first, oracle(case)[0], rtol=1e-12, atol=1e-12)
        else:
            assert_close(first, None, case)
