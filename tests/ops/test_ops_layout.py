"""Rows of a cache: where their parts lie, and which caches are made of them."""

import pytest
import torch

from gva import ops
from gva.ops.config import choose_layout

G, d_h, d_r = 4, 64, 16


def test_packed_row_is_laid_out_as_documented():
    assert ops.packed_row_bytes(G, d_h, d_r) == ops.row_width(G, d_h, d_r, True) == 304
    rows = torch.zeros(1, 1, 304, dtype=torch.uint8)
    v8, r16, s32 = ops.row_views(rows, G, d_h, d_r)
    v8[0, 0, 1, 0], r16[0, 0, 0], s32[0, 0, 2] = 1.0, 1.0, 1.0
    flat = rows.flatten()
    assert flat[64:65].view(torch.float8_e4m3fn).float() == 1
    assert flat[256:258].view(torch.bfloat16) == 1
    assert flat[288 + 8 : 288 + 12].view(torch.float32) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_plain_row_is_values_and_then_k_rope(dtype):
    width = ops.row_width(G, d_h, d_r, False)
    rows = torch.arange(2 * 3 * width).view(2, 3, width).to(dtype)
    pages = ops.row_views(rows, G, d_h, d_r)
    assert torch.equal(pages.values, rows[..., : G * d_h].view(2, 3, G, d_h))
    assert torch.equal(pages.k_rope, rows[..., G * d_h :])
    assert pages.scales is None
    pages.k_rope[1, 2] = -1
    assert (rows[1, 2, G * d_h :] == -1).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_another_width_is_told(dtype):
    with pytest.raises(ValueError, match=r"rows: got .*\(1, 1, 100\), need .*\[P, page, \d+\]"):
        ops.row_views(torch.zeros(1, 1, 100, dtype=dtype), G, d_h, d_r)


def test_rows_for_all_but_a_single_sequence():
    assert [choose_layout(batch) for batch in (1, 2, 256)] == ["separate", "rows", "rows"]
