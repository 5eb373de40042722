"""The plan: every tile of every sequence is read once, by the share that the merging kernel expects."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import needs_triton

from gva import ops

pytestmark = needs_triton
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {"H": 4, "G": 2, "d_h": 64, "d_r": 16, "page": 64, "dtype": torch.bfloat16}


def shares_of(plan, B):
    """(line length, shares in use, entries [unit, tile, tiles, length], first tile of each unit on the line)."""
    from gva.ops import schedule
    from gva.ops.triton import decode

    header, entry = schedule.HEADER, schedule.ENTRY
    assert (header, entry) == (decode.HEADER.value, decode.ENTRY.value)
    schedule = plan.schedule.tolist()
    total, active = schedule[:2]
    entries = [schedule[header + i * entry :][:entry] for i in range(plan.part_lse.shape[0] // 2)]
    return total, active, entries, schedule[-B:]


@settings(max_examples=25, deadline=None)
@given(lens=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 5000)), min_size=1, max_size=20))
def test_every_tile_once(lens):
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    plan = ops.plan_decode(seq_lens, **SHAPE)
    tile = plan.config.tile
    total, active, entries, starts = shares_of(plan, len(lens))
    tiles = [-(-n // tile) for n in lens]
    visited = []
    for share, (unit, first, left, seq_len) in enumerate(entries):
        assert left == 0 or share < active
        assert left == 0 or seq_len == lens[unit]
        while left > 0:
            for i in range(first, min(first + left, tiles[unit])):
                visited.append((unit, i))
                place = starts[unit] + i
                assert ((place + 1) * active - 1) // total == share
            left -= max(0, min(left, tiles[unit] - first))
            unit, first = unit + 1, 0
    assert visited == [(u, i) for u, n in enumerate(tiles) for i in range(n)]


@pytest.mark.parametrize("lens", [[4000], [4000, 1], [100] * 8])
def test_shares_are_even(lens):
    plan = ops.plan_decode(torch.tensor(lens, dtype=torch.int32, device=DEVICE), **SHAPE)
    _, active, entries, _ = shares_of(plan, len(lens))
    work = [left for _, _, left, _ in entries[:active]]
    assert max(work) - min(work) <= 1 + 4 * len(lens)
