"""TilePlanner: which pairs of tiles a mask leaves to compute, and in which of them nothing is hidden."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from freescale.jagged import group_index
from freescale.kernels.attention.mask import NO_WINDOW, AttentionMask, Bools, Ints, Pieces


class TilePairs(NamedTuple):
    """Pairs of tiles in which something is seen: their sequence, tile numbers, and whether everything is."""

    sequence: Ints
    row: Ints
    column: Ints
    full: Bools


class TilePlanner:
    """Pairs of tiles of one batch under one mask; tiles of a size, and pairs of two, are worked out once.

    Args:
        mask: what tokens see.
        starts: [B + 1] of the sequences.
    """

    def __init__(self, mask: AttentionMask, starts: Ints) -> None:
        self.mask, self._starts = mask, starts
        self._lengths: Ints = np.diff(starts)
        self._history: Ints = self._lengths - mask.target_counts(len(self._lengths))
        self._pieces = None if mask.runs is None else mask.runs.within(starts)
        # Where the segment of each piece begins and ends, if segments follow each other.
        self._segments = None if self._pieces is None else _segment_bounds(self._pieces, starts)
        self._tiles: dict[int, _Tiles] = {}
        self._pairs: dict[tuple[int, int], TilePairs] = {}

    def pairs(self, *, rows: int, columns: int) -> TilePairs:
        """Every pair of tiles with something to compute, in order; a pair is full when no score in it is hidden.

        Args:
            rows: queries a tile.
            columns: keys a tile.
        """
        if (rows, columns) not in self._pairs:
            self._pairs[rows, columns] = self._found(self._of(rows), self._of(columns))
        return self._pairs[rows, columns]

    def segment_ends(self) -> tuple[Ints, Ints] | None:
        """Tokens of each piece, and the first token of the batch that no longer sees them by segments; -1 if all do.

        None where no number can say it: a segment comes back after another.
        """
        if self._pieces is None or self._segments is None:
            return None
        counts: Ints = np.diff(self._pieces.starts, append=self._starts[-1])
        return counts, np.where(self._pieces.summary, -1, self._segments[1])

    def _of(self, block: int) -> _Tiles:
        if block not in self._tiles:
            self._tiles[block] = _Tiles(self._starts, block, self._pieces)
        return self._tiles[block]

    def _found(self, rows: _Tiles, columns: _Tiles) -> TilePairs:
        from freescale.kernels.attention.plan import tile_pair_loops

        mask, near = self.mask, self._candidates(rows, columns)
        row, column = np.empty(near.most, np.int64), np.empty(near.most, np.int64)
        full = np.empty(near.most, bool)
        kept = tile_pair_loops.keep_pairs(
            *(rows.number, self._lengths[rows.sequence], self._history[rows.sequence], rows.low, rows.high),
            *(near.own, near.begin, near.last, near.passed),
            *(columns.low, columns.high, columns.any_summary, columns.all_summary, near.summaries),
            *(rows.block, columns.block, NO_WINDOW if mask.window is None else mask.window, mask.prefix),
            *(int(self._pieces is not None), int(mask.only_targets)),
            *(row, column, full),
        )
        row, column, full = row[:kept], column[:kept], full[:kept]
        return TilePairs(rows.sequence[row], rows.number[row], columns.number[column], full)

    def _candidates(self, rows: _Tiles, columns: _Tiles) -> _Candidates:
        """Pairs in which something may be seen: never fewer than are needed, and those above the diagonal for a prefix.

        Where segments follow each other these are the tiles of a row's own segments, and earlier ones with summaries:
        of five segments a tenth of all pairs, and planning takes as long as there are pairs.
        """
        own = columns.first[rows.sequence]
        ahead = self.mask.prefix > 0
        seen = columns.counts[rows.sequence] if ahead else -(-(rows.end - rows.start) // columns.block)
        begin, summaries = own, np.zeros(0, np.int64)
        if self._segments is not None and not ahead:
            begin = own + (self._segments[0][rows.piece] - rows.start) // columns.block
            summaries = np.flatnonzero(columns.any_summary)
        passed = np.searchsorted(summaries, own)
        early = np.searchsorted(summaries, begin) - passed
        most = int((early + own + seen - begin).sum())
        return _Candidates(own, begin, own + seen - 1, passed, summaries, most)


class _Candidates(NamedTuple):
    """Column tiles that a row tile may meet: from `begin` to `last`, and `summaries` before them from `passed` on.

    `own` is the first column tile of the row's sequence, `most` the number of all pairs.
    """

    own: Ints
    begin: Ints
    last: Ints
    passed: Ints
    summaries: Ints
    most: int


class _Tiles:
    """Tiles of one size: where they stand, and the segments in them.

    Args:
        starts: of the sequences.
        block: tokens a tile.
        pieces: runs of equal tokens, none of them in two sequences.
    """

    def __init__(self, starts: Ints, block: int, pieces: Pieces | None) -> None:
        self.block = block
        self.counts: Ints = -(-np.diff(starts) // block)
        self.first: Ints = np.cumsum(self.counts) - self.counts
        self.sequence, self.number = group_index(self.counts)
        self.start: Ints = starts[:-1][self.sequence]
        begin: Ints = self.start + self.number * block
        self.end: Ints = np.minimum(begin + block, starts[1:][self.sequence])
        if pieces is None or not len(begin):
            self.low = self.high = self.piece = begin
            self.any_summary = self.all_summary = np.zeros(len(begin), bool)
            return
        self.piece = np.searchsorted(pieces.starts, begin, side="right") - 1
        last = np.searchsorted(pieces.starts, self.end - 1, side="right")
        # Pairs of bounds: every second result is that of a tile, the others of what lies between.
        bounds = np.stack([self.piece, last], axis=1).ravel()
        segment = np.append(pieces.segment, pieces.segment[-1:])
        self.low = np.minimum.reduceat(segment, bounds)[::2].copy()
        self.high = np.maximum.reduceat(segment, bounds)[::2].copy()
        before = np.append(0, np.cumsum(pieces.summary))
        of_summaries = before[last] - before[self.piece]
        self.any_summary = of_summaries > 0
        self.all_summary = of_summaries == last - self.piece


def _segment_bounds(pieces: Pieces, starts: Ints) -> tuple[Ints, Ints] | None:
    """First token of the segment of each piece, and of what follows it; None where numbers fall inside a sequence."""
    fresh = np.zeros(len(pieces.starts), bool)
    fresh[np.searchsorted(pieces.starts, starts[:-1][np.diff(starts) > 0])] = True
    steps = pieces.segment[1:] - pieces.segment[:-1]
    if (steps[~fresh[1:]] < 0).any():
        return None
    fresh[1:] |= steps != 0
    begins, segment = pieces.starts[fresh], np.cumsum(fresh) - 1
    return begins[segment], np.append(begins[1:], starts[-1])[segment]
