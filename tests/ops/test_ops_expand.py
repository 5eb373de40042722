"""The kernel that builds keys and repeats values, against plain torch in float64."""

import pytest
import torch
from ops_cases import needs_triton

from gva import ops
from gva.ops import dispatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [needs_triton, *([pytest.mark.gpu] if DEVICE == "cuda" else [])]


def draw(B, T, G, R, d_h, d_n, d_r, dtype):
    generator = torch.Generator().manual_seed(T)
    rows = torch.full((B, T, G * d_h + d_r + 3), float("nan"))  # values and slice are views into wider rows
    rows[..., : G * d_h + d_r] = torch.randn(B, T, G * d_h + d_r, generator=generator)
    rows = rows.to(DEVICE, dtype)
    maps = torch.randn(G * R, d_n, d_h, generator=generator).to(DEVICE, dtype) * d_h**-0.5
    return rows[..., : G * d_h].unflatten(-1, (G, d_h)), rows[..., G * d_h : G * d_h + d_r], maps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("B", "T", "G", "R", "d_h", "d_n", "d_r"),
    [(2, 33, 4, 4, 64, 48, 16), (1, 70, 2, 3, 32, 32, 8), (1, 5, 1, 1, 80, 40, 40), (2, 16, 2, 2, 128, 112, 16)],
)
def test_matches_float64(B, T, G, R, d_h, d_n, d_r, dtype):
    case = draw(B, T, G, R, d_h, d_n, d_r, dtype)
    keys, values = ops.expand(*case, impl="triton")
    eager, repeated = ops.expand(*case, impl="reference")
    exact, _ = ops.expand(*(x.double() for x in case), impl="reference")
    assert torch.equal(values, repeated)
    assert torch.equal(keys[..., d_n:], eager[..., d_n:])
    bound = 2 * (eager.double() - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert (keys.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tokens_in_pages(dtype):
    """At slots, in any order and with gaps between pages, as if they lay one after another."""
    values, k_rope, maps = draw(7, 16, 2, 3, 32, 16, 16, dtype)  # seven pages of 16 tokens
    values, k_rope = values[::2], k_rope[::2]
    slots = torch.randperm(4 * 16, generator=torch.Generator().manual_seed(0))[:33].to(DEVICE)
    got = dispatch.expand(values, k_rope, maps, slots, impl="triton")
    read = dispatch.expand(values, k_rope, maps, slots, impl="reference")
    wanted = dispatch.expand(values.flatten(0, 1)[slots], k_rope.flatten(0, 1)[slots], maps, impl="triton")
    for ours, reference, in_order in zip(got, read, wanted, strict=True):
        assert torch.equal(ours, in_order)
        torch.testing.assert_close(ours, reference)


def test_no_tokens():
    keys, values = ops.expand(*draw(2, 0, 2, 2, 32, 16, 16, torch.float32), impl="triton")
    assert keys.shape == (2, 0, 4, 32)
    assert values.shape == (2, 0, 4, 32)


def test_shapes_that_do_not_fit_are_told():
    values, k_rope, maps = draw(1, 4, 2, 2, 32, 16, 16, torch.float32)
    with pytest.raises(ValueError, match=r"maps \(3, 16, 32\): need .* a multiple of G"):
        ops.expand(values, k_rope, maps[:3])


@pytest.mark.compiles
def test_it_traces():
    case = draw(1, 4, 2, 2, 32, 16, 16, torch.float32)
    compiled = torch.compile(lambda *args: ops.expand(*args, impl="reference"), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*case), ops.expand(*case, impl="reference"), strict=True):
        assert torch.equal(got, want)
