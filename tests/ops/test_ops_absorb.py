"""The kernel that absorbs the maps into queries, against plain torch in float64."""

import pytest
import torch
from ops_cases import needs_triton

from gva import ops
from gva.ops.dispatch import absorb

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [needs_triton, *([pytest.mark.gpu] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("N", "H", "d_h", "d_n", "d_r"),
    [(33, 4, 64, 48, 16), (70, 3, 32, 32, 8), (1, 2, 80, 40, 40), (5, 2, 128, 112, 16), (3, 2, 320, 240, 16)],
)
def test_matches_float64(N, H, d_h, d_n, d_r, dtype):
    generator = torch.Generator().manual_seed(N)
    rows = torch.randn(2 * N, H, d_n + d_r + 8, generator=generator).to(DEVICE, dtype)
    q, maps = rows[::2, :, : d_n + d_r], torch.randn(H, d_n, d_h, generator=generator).to(DEVICE, dtype) * d_h**-0.5
    got, eager = (absorb(q, maps, impl=impl) for impl in ("triton", "reference"))
    exact = absorb(q.double(), maps.double(), impl="reference")
    assert got.is_contiguous()
    assert got.shape == (N, H, d_h)
    bound = 2 * (eager.double() - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert (got.double() - exact).abs().max() <= bound


def test_no_tokens():
    q, maps = torch.zeros(0, 2, 32, device=DEVICE), torch.zeros(2, 16, 48, device=DEVICE)
    assert absorb(q, maps, impl="triton").shape == (0, 2, 48)


@pytest.mark.compiles
def test_the_public_door_takes_any_number_of_dimensions_and_one_node_of_a_graph():
    """Content alone or a whole query, of views as they come; torch.compile sees one op."""
    rows, maps = torch.randn(2, 3, 4, 24, device=DEVICE), torch.randn(4, 16, 32, device=DEVICE)
    exact = torch.einsum("bshn,hnd->bshd", rows[..., :16].double(), maps.double())
    for q in (rows, rows[..., :16]):
        for impl in ("reference", "triton", None):
            got = ops.absorb(q, maps, impl=impl)
            assert got.shape == (2, 3, 4, 32)
            assert got.is_contiguous()
            torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(ops.absorb(rows[0, 0], maps), ops.absorb(rows[:1, 0], maps)[0])
    turned = rows.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(ops.absorb(turned, maps), ops.absorb(rows, maps))
    compiled = torch.compile(lambda q: ops.absorb(q, maps, impl="reference"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(rows), ops.absorb(rows, maps, impl="reference"))


def test_what_does_not_fit_is_told():
    q, maps = torch.zeros(2, 4, 16, device=DEVICE), torch.zeros(4, 16, 32, device=DEVICE)
    with pytest.raises(ValueError, match=r"q \(2, 4, 8\), maps \(4, 16, 32\): need \[..., H, d_n\], or wider"):
        ops.absorb(q[..., :8], maps)
    with pytest.raises(ValueError, match=r"maps: got torch.float64, allowed torch.float32"):
        ops.absorb(q, maps.double())
    with pytest.raises(ValueError, match=r"impl='cuda_'"):
        ops.absorb(q, maps, impl="cuda_")
    with pytest.raises(RuntimeError, match=r"q: requires grad, and this op has no backward"):
        ops.absorb(q.requires_grad_(), maps)
