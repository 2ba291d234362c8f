"""What attention does in which program: parts of a batch that fit, and runs of tiles, each tile once."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.kernels import AttentionMask
from freescale.kernels.attention.plan.bias import joined
from freescale.kernels.attention.plan.schedule import BIAS_ROWS, AttentionSchedule


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 2000), min_size=1, max_size=20),
    room=st.integers(0, 400),
    prefix=st.integers(0, 1),
)
def test_parts_hold_neighbouring_sequences_and_fit(lengths, room, prefix):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    work = AttentionSchedule(offsets, device=torch.device("cpu"))
    mask = AttentionMask(prefix=1) if prefix else None
    parts = work.parts(mask, room=room * BIAS_ROWS**2)
    longest = -(-max(lengths) // BIAS_ROWS)
    largest = longest**2 if prefix else longest * (longest + 1) // 2
    if not parts:
        assert largest == 0 or largest > room
        return
    assert all(0 < part.blocks <= room for part in parts)
    assert sum(part.blocks for part in parts) * BIAS_ROWS**2 == work.bias_store(mask).size
    for before, after in pairwise(parts):
        assert before.tokens[1] == after.tokens[0]
        assert before.block + before.blocks == after.block
    assert (parts[0].tokens[0], parts[0].block) == (0, 0)
    assert parts[-1].tokens[1] == offsets[-1]
    seen = [
        work.tiles("keys", block=64, other=32, mask=mask, part=part).tiles[:, 0].tolist() for part in parts
    ]
    whole = work.tiles("keys", block=64, other=32, mask=mask).tiles[:, 0].tolist()
    assert sorted(start for tiles in seen for start in tiles) == sorted(whole)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    programs=st.integers(1, 50),
    window=st.none() | st.integers(0, 100),
)
def test_runs_hold_every_tile_once(lengths, programs, window):
    work = AttentionSchedule(torch.tensor([0, *lengths]).cumsum(0), device=torch.device("cpu"))
    mask = None if window is None else AttentionMask(window=window, prefix=window % 2)
    tiles = {tuple(x) for x in work._pair_tiles(32, 32, mask)[:, [0, 2, 3]].tolist()}
    runs = work._runs(32, mask, programs)
    found = [(x[0], x[2] + n, x[3] + n) for x in runs.tolist() for n in range(x[4])]
    assert len(found) == len(tiles)
    assert set(found) == tiles
    if tiles:
        limit = -(-len(tiles) // programs)
        assert runs[:, 4].max() <= limit
        again = joined(work._pair_tiles(32, 32, mask), limit=limit)
        assert sorted(again.tolist()) == sorted(runs.tolist())
