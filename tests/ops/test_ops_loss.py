"""The fused head and loss against plain torch, in value and in gradient."""

import pytest
import torch
from ops_cases import needs_triton

from gva import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [needs_triton, *([pytest.mark.gpu] if DEVICE == "cuda" else [])]
IGNORED = -100


def draw(N, D, V, dtype, ignored=()):
    generator = torch.Generator().manual_seed(N * V + D)
    hidden = torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) * D**-0.5
    labels = torch.randint(V, (N,), generator=generator)
    labels[list(ignored)] = IGNORED
    return hidden.to(DEVICE, dtype), weight.to(DEVICE), labels.to(DEVICE)


def run(hidden, weight, labels, impl, factor=0.125):
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    loss = ops.linear_cross_entropy(hidden, weight, labels, IGNORED, impl=impl)
    (loss * factor).backward()
    return loss.detach(), hidden.grad, weight.grad


def error(got, want):
    return (got.double() - want.double()).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("N", "D", "V"), [(5, 16, 64), (3, 32, 8192), (4, 16, 8200), (2, 16, 20000), (1, 16, 1)])
def test_matches_float64(N, D, V, dtype):
    hidden, weight, labels = draw(N, D, V, dtype, ignored=[0] if N > 1 else [])
    exact = run(hidden.double(), weight.to(dtype).double(), labels, "reference")
    eager = run(hidden, weight, labels, "reference")
    fused = run(hidden, weight, labels, "triton")
    for name, ours, theirs, true in zip(("loss", "d_hidden", "d_weight"), fused, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.isfinite().all()
        bound = 2 * error(theirs, true) + 2 * torch.finfo(dtype).eps * true.abs().max().item()
        assert error(ours, true) <= bound, name


def test_ignored_rows_have_no_loss_and_no_gradient():
    hidden, weight, labels = draw(4, 16, 100, torch.float32, ignored=[0, 1, 2, 3])
    loss, d_hidden, d_weight = run(hidden, weight, labels, "triton")
    assert loss == 0
    assert not d_hidden.any()
    assert not d_weight.any()


def test_large_logits_do_not_overflow():
    hidden, weight, labels = draw(3, 16, 300, torch.float32)
    loss, d_hidden, _ = run(hidden * 1e4, weight, labels, "triton")
    want, want_hidden, _ = run(hidden * 1e4, weight, labels, "reference")
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(d_hidden, want_hidden)


def test_no_rows():
    hidden, weight, labels = draw(0, 16, 64, torch.float32)
    assert run(hidden, weight, labels, "triton")[0] == 0
