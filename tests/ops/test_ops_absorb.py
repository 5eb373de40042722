"""The kernel that absorbs the maps into queries, against plain torch in float64."""

import pytest
import torch
from ops_cases import needs_triton

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
