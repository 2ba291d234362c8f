"""What attention does in which program: parts of a batch that fit, and runs of tiles, each tile once."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels import AttentionMask, LayoutRoom
from freescale.kernels.attention.plan.bias import joined
from freescale.kernels.attention.plan.room import BIAS_ROWS
from freescale.kernels.attention.plan.schedule import AttentionSchedule
from tests.effort import examples


@examples(17, thorough=200)
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


@examples(17, thorough=200)
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
        again = joined(work._pair_tiles(32, 32, mask), size=32, limit=limit)
        assert sorted(again.tolist()) == sorted(runs.tolist())


@examples(13, thorough=200)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    pads=st.integers(0, 200),
    longer=st.sampled_from([0, 3, 100, 4000]),
)
def test_lists_of_padded_batches_have_sizes_that_no_length_changes(lengths, pads, longer):
    room = LayoutRoom(tokens=sum(lengths) + pads, longest=max(1, *lengths) + longer)
    plain, ours, other = (
        AttentionSchedule(torch.tensor([0, *of]).cumsum(0), device=torch.device("cpu"), room=room_of)
        for of, room_of in ((lengths, None), (lengths, room), ([0] * len(lengths), room))
    )
    for work in (plain, ours, other):
        work.parts(None, room=2**40)
    for side in ("queries", "keys"):
        tiles, ours_, empty = (
            w.tiles(side, block=64, other=32, mask=None).tiles for w in (plain, ours, other)
        )
        assert torch.equal(ours_[: len(tiles)], tiles)
        assert not ours_[len(tiles) :].any()
        assert ours_.shape == empty.shape
    stores = [work.bias_store(None) for work in (plain, ours, other)]
    assert torch.equal(stores[1].pieces[: len(stores[0].pieces)], stores[0].pieces)
    assert not stores[1].pieces[len(stores[0].pieces) :].any()
    assert stores[0].size <= stores[1].size == stores[2].size
    assert [x.shape for x in stores[1][:3]] == [x.shape for x in stores[2][:3]]
    for programs in (5, 8192):
        plans = [
            work.table_plan(
                rows=32, columns=32, mask=None, parts=work.parts(None, room=2**40), programs=programs
            )
            for work in (plain, ours, other)
        ]
        assert torch.equal(plans[1].runs[: len(plans[0].runs)], plans[0].runs)
        assert not plans[1].runs[len(plans[0].runs) :].any()
        assert plans[1].part_runs == plans[2].part_runs
        assert shapes_of(plans[1]) == shapes_of(plans[2])
        # Each row of sums by the group it is added to: the same for real runs, none for others.
        groups = [groups_of(plan) for plan in plans]
        num_rows = len(plans[0].runs) * 7
        assert {row: g for row, g in groups[1].items() if row < num_rows} == groups[1]
        shift = plans[1].num_groups - plans[0].num_groups
        assert groups[1] == {row: g if g < plans[0].num_groups else g + shift for row, g in groups[0].items()}
        assert not groups[2]


def shapes_of(plan):
    return [x.shape for x in (plan.runs, *plan.chunks, *plan.groups)], plan.num_groups, plan.num_chunks


def groups_of(plan):
    """The group that each row of sums ends up in, by way of the chunks."""
    order, starts = plan.chunks.order.tolist(), plan.chunks.starts.tolist()
    chunks, group_starts = plan.groups.order.tolist(), plan.groups.starts.tolist()
    return {
        row: group
        for group, (begin, end) in enumerate(pairwise(group_starts))
        for chunk in chunks[begin:end]
        for row in order[starts[chunk] : starts[chunk + 1]]
    }


@given(
    lengths=st.lists(st.integers(0, 600), min_size=1, max_size=8),
    longer=st.integers(0, 4000),
    block=st.sampled_from([16, 32, 128]),
)
def test_there_is_room_for_all_pairs_of_tiles(lengths, longer, block):
    """Also where few sequences have all tokens; compiled loops would write past the end of a shorter list."""
    room = LayoutRoom(tokens=sum(lengths), longest=max(1, *lengths) + longer)
    tiles = [-(-length // block) for length in lengths]
    assert sum(tiles) <= room.tiles(len(lengths), block)
    assert sum(n * (n + 1) // 2 for n in tiles) <= room.pairs(len(lengths), block)
