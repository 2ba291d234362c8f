"""ListFiller: the lists of a padded batch, without a mask, by the names layouts are asked for them.

Sizes follow from `LayoutRoom` and the number of sequences alone; `list_loops` writes what a batch has in them.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from freescale.kernels.attention.mask import Ints
from freescale.kernels.attention.plan.bias import CHUNK, bucket_rows
from freescale.kernels.attention.plan.room import BIAS_ROWS, LayoutRoom
from freescale.kernels.attention.plan.wishes import Wish

Shapes = list[tuple[int, ...]]


class ListFiller:
    """Fills lists of one batch.

    Args:
        starts: [B + 1] int64 where its sequences start, and the end.
        room: of the batch.
    """

    def __init__(self, starts: Ints, room: LayoutRoom) -> None:
        self._starts, self._room = starts, room
        self._num = len(starts) - 1

    @cached_property
    def _order(self) -> Ints:
        from freescale.kernels.attention.plan import list_loops

        order = np.empty(self._num, np.int64)
        list_loops.longest_first(self._starts, order)
        return order

    @cached_property
    def _before(self) -> Ints:
        from freescale.kernels.attention.plan import list_loops

        before = np.empty(self._num, np.int64)
        list_loops.blocks_before(self._starts, BIAS_ROWS, before)
        return before

    def shapes(self, wish: Wish) -> Shapes:
        """The sizes of the arrays of a list."""
        room, num, (name, *how) = self._room, self._num, wish
        if name == "device_offsets":
            return [(num + 1,)]
        if name == "by_length":
            # Each row begins on 16 bytes, which kernels rely on.
            return [(3, max(num, room.longest) + 1 & ~1)]
        if name == "token_tiles":
            return [(room.tiles(num, how[0]), 3)]
        if name == "tiles":
            return [(room.tiles(num, how[1]), 8)]
        if name == "bias_store":
            blocks = room.tiles(num, BIAS_ROWS)
            return [(blocks, 2), (blocks, 3), (room.pairs(num, BIAS_ROWS), 2)]
        assert name == "table_plan", name
        size, _, _, programs = how
        most = min(room.pairs(num, size), programs + room.tiles(num, size))
        distances, buckets = -(-room.longest // size) + 1, bucket_rows(size)
        chunks = -(-2 * most // CHUNK) + distances + (-(-most // CHUNK) + 1) * buckets
        return [(most, 8), ((2 + buckets) * most,), (chunks + 1,), (chunks,), (distances + buckets + 1,)]

    def fill(self, wish: Wish, arrays: list[Ints]) -> None:
        """Write a list into arrays of these sizes."""
        from freescale.kernels.attention.plan import list_loops

        starts, (name, *how) = self._starts, wish
        if name == "device_offsets":
            arrays[0][:] = starts
        elif name == "by_length":
            list_loops.by_length(starts, self._order, arrays[0])
        elif name == "token_tiles":
            list_loops.token_tiles(starts, how[0], arrays[0])
        elif name == "tiles":
            queries = how[0] == "queries"
            list_loops.tiles(starts, self._order, self._before, queries, how[1], arrays[0])
        elif name == "bias_store":
            list_loops.bias_store(starts, BIAS_ROWS, *arrays)
        else:
            size, _, _, programs = how
            runs, members, chunk_starts, chunks, group_starts = arrays
            list_loops.bias_plan(
                *(starts, self._before, size, programs, CHUNK, bucket_rows(size)),
                *(runs, members, chunk_starts, group_starts),
            )
            chunks[:] = np.arange(len(chunks))
