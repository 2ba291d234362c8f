"""AttentionMask: what a token may see beyond "everything before it", and which tiles that leaves to compute.

A token always sees itself. Otherwise token i of a sequence sees token j when

    j is not a target, and
        j <= i  and  (close enough or j in the prefix)  and  (same segment or j is a summary)
        or  i is in the prefix

`window` counts from the end of the history for targets: they all stand right after the last event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
NO_WINDOW = 2**31 - 1


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which earlier tokens a token sees; make one a batch, on the CPU, and share it between layers.

    Args:
        window: see at most this many tokens back.
        prefix: this many tokens at the start of each sequence see the whole history and are seen from everywhere.
        targets: [B] how many tokens at the end of each sequence are candidates that do not see each other.
        segments: [T] number of the segment a token belongs to.
        summaries: [T] true for tokens that later segments may see too; needs `segments`.
    """

    window: int | None = None
    prefix: int = 0
    targets: Tensor | None = None
    segments: Tensor | None = None
    summaries: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 0:
            raise ValueError(f"window must be 0 or more, got {self.window}")
        if self.prefix < 0:
            raise ValueError(f"prefix must be 0 or more, got {self.prefix}")
        if self.summaries is not None and self.segments is None:
            raise ValueError("summaries need segments")

    def check(self, lengths: Ints) -> None:
        """Refuse counts that do not fit these sequences."""
        tokens = int(lengths.sum())
        for name, x, wanted in (
            ("targets", self.targets, len(lengths)),
            ("segments", self.segments, tokens),
            ("summaries", self.summaries, tokens),
        ):
            if x is not None and len(x) != wanted:
                raise ValueError(f"{name} has {len(x)} entries, the batch needs {wanted}")
        counts = self.target_counts(len(lengths))
        if (counts < 0).any() or (counts > lengths).any():
            raise ValueError("targets must be between 0 and the length of their sequence")

    def target_counts(self, num_sequences: int) -> Ints:
        """Targets of every sequence."""
        if self.targets is None:
            return np.zeros(num_sequences, np.int64)
        return self.targets.cpu().numpy().astype(np.int64)

    def codes(self) -> Ints | None:
        """Segment * 2 + is a summary, for every token."""
        if self.segments is None:
            return None
        codes = self.segments.cpu().numpy().astype(np.int64) * 2
        return codes if self.summaries is None else codes + self.summaries.cpu().numpy().astype(bool)

    def allowed(self, start: int, stop: int, num_targets: int) -> Tensor:
        """The plain truth for one sequence: [length, length], true where row sees column."""
        length = stop - start
        history = length - num_targets
        i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
        seen = j <= i
        if self.window is not None:
            seen = seen & ((i.clamp(max=history) - j <= self.window) | (j < self.prefix))
        if self.segments is not None:
            own = self.segments[start:stop].cpu()
            same = own[:, None] == own[None, :]
            if self.summaries is not None:
                same = same | self.summaries[start:stop].cpu().bool()[None, :]
            seen = seen & same
        return ((seen | (i < self.prefix)) & (j < history)) | (i == j)


class TilePairs(NamedTuple):
    """Pairs of tiles in which something is seen: their sequence, tile numbers, and whether everything is."""

    sequence: Ints
    row: Ints
    column: Ints
    full: Bools


def tile_pairs(
    mask: AttentionMask, starts: Ints, *, block_rows: int, block_columns: int, targets: Ints
) -> TilePairs:
    """Every pair of tiles with something to compute; a pair is full when no score in it is hidden."""
    lengths = np.diff(starts)
    sequence, row, column = _all_pairs(-(-lengths // block_rows), -(-lengths // block_columns))
    length, history = lengths[sequence], (lengths - targets)[sequence]
    i0, j0 = row * block_rows, column * block_columns
    i1, j1 = np.minimum(i0 + block_rows, length) - 1, np.minimum(j0 + block_columns, length) - 1
    some = (j0 <= i1) & (j0 < history)
    every = (j1 <= i0) & (j1 < history) & (i0 + block_rows <= length) & (j0 + block_columns <= length)
    if mask.window is not None:
        near, far = np.minimum(i0, history) - j1, np.minimum(i1, history) - j0
        some &= (near <= mask.window) | (j0 < mask.prefix)
        every &= (far <= mask.window) | (j1 < mask.prefix)
    codes = mask.codes()
    if codes is not None:
        rows = _tile_segments(codes, starts, block_rows)
        columns = _tile_segments(codes, starts, block_columns)
        r, c = rows.first[sequence] + row, columns.first[sequence] + column
        meet = (rows.low[r] <= columns.high[c]) & (columns.low[c] <= rows.high[r])
        one = (rows.low[r] == rows.high[r]) & (columns.low[c] == columns.high[c]) & meet
        some &= meet | columns.any_summary[c]
        every &= one | columns.all_summary[c]
    some |= (i0 < mask.prefix) & (j0 < history)
    # Targets, and whatever a mask hides around it: a token sees itself.
    some |= (i0 <= j1) & (j0 <= i1)
    kept = np.flatnonzero(some)
    return TilePairs(sequence[kept], row[kept], column[kept], (every & some)[kept])


def _all_pairs(row_tiles: Ints, column_tiles: Ints) -> tuple[Ints, Ints, Ints]:
    """(sequence, row tile, column tile) of every pair, also those above the diagonal."""
    counts = row_tiles * column_tiles
    sequence = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    width = column_tiles[sequence]
    return sequence, place // width, place % width


class _TileSegments(NamedTuple):
    """Lowest and highest segment of each tile, and whether its tokens are summaries."""

    first: Ints
    low: Ints
    high: Ints
    any_summary: Bools
    all_summary: Bools


def _tile_segments(codes: Ints, starts: Ints, block: int) -> _TileSegments:
    lengths = np.diff(starts)
    tiles = -(-lengths // block)
    first = np.cumsum(tiles) - tiles
    sequence = np.repeat(np.arange(len(tiles)), tiles)
    begin = starts[:-1][sequence] + (np.arange(len(sequence)) - first[sequence]) * block
    if not len(begin):
        empty = np.zeros(0, np.int64)
        return _TileSegments(first, empty, empty, empty.astype(bool), empty.astype(bool))
    segments, summaries = codes >> 1, codes & 1
    return _TileSegments(
        first,
        np.minimum.reduceat(segments, begin),
        np.maximum.reduceat(segments, begin),
        np.maximum.reduceat(summaries, begin).astype(bool),
        np.minimum.reduceat(summaries, begin).astype(bool),
    )
