"""Layouts: where the tokens of a jagged batch stand, in tiles and by the length of their sequences."""

from __future__ import annotations

import torch

from freescale.kernels import LayoutWishes, SequenceLayout
from freescale.kernels.attention.plan.room import BIAS_ROWS
from freescale.kernels.runtime import Parcel


def test_tiles_cover_every_token_once():
    layout = SequenceLayout(torch.tensor([0, 0, 5, 70, 70, 198]))
    tiles = layout.token_tiles(64)
    assert tiles.tolist() == [[1, 0, 5], [2, 5, 64], [2, 69, 1], [4, 70, 64], [4, 134, 64]]
    assert layout.token_tiles(64) is tiles


def test_positions_reached_are_counted():
    layout = SequenceLayout(torch.tensor([0, 3, 3, 4, 9]))
    sequence, first, reach = layout.by_length
    assert sequence.tolist() == [3, 0, 2, 1]
    assert first.tolist() == [4, 0, 3, 3]
    assert reach.tolist() == [3, 2, 2, 1, 1]
    assert [len(x) for x in SequenceLayout(torch.tensor([0, 0])).by_length] == [1, 1, 0]


def test_lists_made_before_anybody_asks_are_those_made_when_asked():
    wishes, lengths = LayoutWishes(), ([70, 0, 300, 3], [1, 64, 65, 130])
    offsets = [torch.tensor([0, *each]).cumsum(0) for each in lengths]

    def ask(layout):
        work = layout.work
        parts = work.parts(None, room=3 * BIAS_ROWS**2 * 4)
        lists = [work.tiles("queries", block=64, other=32, mask=None)]
        lists += [work.tiles("keys", block=32, other=64, mask=None, part=part) for part in parts]
        plan = work.table_plan(rows=32, columns=32, mask=None, parts=parts, programs=9)
        tables = [tensor for each in lists for tensor in each] + [plan.runs, *plan.chunks, *plan.groups]
        store = work.bias_store(None)
        return [*tables, *store[:3], layout.token_tiles(64), *layout.by_length, layout.device_offsets]

    ask(SequenceLayout(offsets[0], wishes=wishes))
    for each in offsets:
        for room in (1 << 20, 100):  # all in one parcel, or most of it alone
            ahead = SequenceLayout(each, wishes=wishes)
            parcel = Parcel(torch.device("cpu"), room=room)
            ahead.prepare(parcel)
            parcel.send()
            assert (parcel.wanted == parcel.filled) is (room > 100)
            for got, want in zip(ask(ahead), ask(SequenceLayout(each)), strict=True):
                assert torch.equal(got, want)
