"""The loss with a teacher against plain torch, in value and in gradient."""

import pytest
import torch
from ops_cases import needs_triton
from torch.nn import functional

from gva import ops
from gva.ops import distill

IGNORED = -100


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def draw(N=11, V=37, dtype=torch.float64, ignored=(2, 7)):
    generator = torch.Generator().manual_seed(N)
    sizes = {"hidden": (N, 8), "weight": (V, 8), "teacher_hidden": (N, 12), "teacher_weight": (V, 12)}
    found = {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
    found["labels"] = torch.randint(V, (N,), generator=generator)
    found["labels"][list(ignored)] = IGNORED
    return {name: tensor.to(DEVICE) for name, tensor in found.items()}


def run(loss, given, **how):
    hidden, weight = (given[name].clone().requires_grad_() for name in ("hidden", "weight"))
    objective, parts = loss(**{**given, "hidden": hidden, "weight": weight}, **how)
    (objective * 0.125).backward()
    return {"objective": objective.detach(), "parts": parts, "d_hidden": hidden.grad, "d_weight": weight.grad}


def by_the_book(hidden, weight, labels, teacher_hidden, teacher_weight, kl_weight=1.0, temperature=1.0):
    wide, keep = torch.promote_types(hidden.dtype, torch.float32), labels != IGNORED
    logits, teacher = (hidden @ weight.T).to(wide), (teacher_hidden @ teacher_weight.T).to(wide)
    cross_entropy = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    soft = [(x[keep] / temperature).log_softmax(-1) for x in (logits, teacher)]
    kl = functional.kl_div(*soft, log_target=True, reduction="sum")
    return cross_entropy + kl_weight * temperature**2 * kl, torch.stack([cross_entropy, kl]).detach()


@pytest.mark.parametrize(("kl_weight", "temperature"), [(1.0, 1.0), (0.7, 2.0), (3.0, 0.5), (0.0, 2.0)])
def test_matches_plain_torch_in_float64(kl_weight, temperature):
    given, how = draw(), {"kl_weight": kl_weight, "temperature": temperature}
    want = run(by_the_book, given, **how)
    for chunk in (None, 1, 4, 11):
        got = run(ops.linear_distillation, given, chunk=chunk, **how)
        for name, true in want.items():
            torch.testing.assert_close(got[name], true, rtol=1e-12, atol=1e-13, msg=f"{name}, {chunk}")


@needs_triton
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("N", "V"), [(11, 37), (5, 8192), (3, 8200), (2, 20000), (1, 1)])
def test_rounds_no_more_than_plain_torch(N, V, dtype, impl):
    given, how = draw(N, V, dtype, [0] if N > 1 else []), {"kl_weight": 0.7, "temperature": 2.0}
    exact = run(by_the_book, {name: x.double() if x.is_floating_point() else x for name, x in given.items()}, **how)
    eager, ours = run(by_the_book, given, **how), run(ops.linear_distillation, given, chunk=4, impl=impl, **how)
    for name, true in exact.items():
        assert ours[name].dtype == eager[name].dtype
        error, theirs = ((x[name].double() - true).abs().max() for x in (ours, eager))
        assert error <= 2 * theirs + 2 * torch.finfo(dtype).eps * true.abs().max(), name


@needs_triton
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_what_is_ignored_has_no_part_in_it_whatever_it_is(impl):
    given = draw(dtype=torch.float32)
    clean = run(ops.linear_distillation, given, impl=impl)
    for name in ("hidden", "teacher_hidden"):
        given[name][[2, 7]] = 1e30
    spoilt = run(ops.linear_distillation, given, impl=impl)
    for name in ("objective", "parts", "d_weight"):
        torch.testing.assert_close(spoilt[name], clean[name])
    assert not spoilt["d_hidden"][[2, 7]].any()


def test_a_teacher_that_agrees_adds_nothing():
    given = draw()
    given |= {"teacher_hidden": given["hidden"], "teacher_weight": given["weight"]}
    got, alone = (run(ops.linear_distillation, given, kl_weight=w, temperature=2.0) for w in (5.0, 0.0))
    assert got["parts"][1].abs() < 1e-12
    torch.testing.assert_close(got["d_weight"], alone["d_weight"])
    assert not run(ops.linear_distillation, draw(1, ignored=[0]))["d_weight"].any()


def test_no_more_logits_than_said_are_held(monkeypatch):
    given, held, plain = draw(), [], distill._losses
    want = run(ops.linear_distillation, given)

    def counted(student, teacher, *more):
        held.append((len(student), len(teacher)))
        return plain(student, teacher, *more)

    monkeypatch.setattr(distill, "LOGITS", {True: 4 * 37, False: 4 * 37 + 1})
    monkeypatch.setattr(distill, "_losses", counted)
    got = run(ops.linear_distillation, given)
    assert held == [(4, 4), (4, 4), (3, 3)]
    torch.testing.assert_close(got["d_weight"], want["d_weight"])
