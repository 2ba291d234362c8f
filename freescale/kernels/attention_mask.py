"""AttentionMask: what a token may see beyond "everything before it", and which tiles that leaves to compute.

A token always sees itself. Otherwise token i of a sequence sees token j when

    j is not a target, and
        j <= i  and  (close enough or j in the prefix)  and  (same segment or j is a summary)
        or  i is in the prefix

`window` counts from the end of the history for targets: they all stand right after the last event.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
NO_WINDOW = 2**31 - 1


class Pieces(NamedTuple):
    """Runs of neighbouring tokens of one segment and one kind: all that planning must know of them.

    Args:
        starts: first token of each, rising from 0.
        segment: number of its segment.
        summary: whether its tokens are summaries.
    """

    starts: Ints
    segment: Ints
    summary: Bools

    def within(self, starts: Ints) -> Pieces:
        """The same, none of them in two sequences; sequences begin at `starts`, the last of which is the end."""
        cut = np.union1d(self.starts, starts[:-1])
        cut = cut[cut < starts[-1]]
        of = np.searchsorted(self.starts, cut, side="right") - 1
        return Pieces(cut, self.segment[of], self.summary[of])


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which earlier tokens a token sees; make one a batch, and share it between layers.

    Counts are wanted on the CPU. So are segments and summaries, unless `pieces` says the same in short.

    Args:
        window: see at most this many tokens back.
        prefix: this many tokens at the start of each sequence see the whole history and are seen from everywhere.
        targets: [B] how many tokens at the end of each sequence are candidates that do not see each other.
        segments: [T] number of the segment a token belongs to.
        summaries: [T] true for tokens that later segments may see too; needs `segments`.
        pieces: the runs of equal tokens in `segments` and `summaries`; found there unless given.
    """

    window: int | None = None
    prefix: int = 0
    targets: Tensor | None = None
    segments: Tensor | None = None
    summaries: Tensor | None = None
    pieces: Pieces | None = None

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

    @cached_property
    def runs(self) -> Pieces | None:
        """The pieces, given or found; None without segments."""
        if self.pieces is not None or self.segments is None:
            return self.pieces
        segments = self.segments.cpu().numpy().astype(np.int64)
        summaries = np.zeros(len(segments), bool)
        if self.summaries is not None:
            summaries = self.summaries.cpu().numpy().astype(bool)
        changes = np.flatnonzero((np.diff(segments) != 0) | (np.diff(summaries) != 0)) + 1
        starts = np.concatenate([[0], changes])[: len(segments)]
        return Pieces(starts, segments[starts], summaries[starts])

    def codes(self, device: torch.device) -> Tensor | None:
        """Segment * 2 + is a summary, for every token, as the kernels read them."""
        if self.segments is None:
            return None
        codes = self.segments.to(device, non_blocking=True).to(torch.int32) * 2
        return (
            codes if self.summaries is None else codes + self.summaries.to(device, non_blocking=True).bool()
        )

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
    from freescale.kernels import tile_pair_loops

    lengths = np.diff(starts)
    pieces = None if mask.runs is None else mask.runs.within(starts)
    rows = _Tiles(starts, block_rows, pieces)
    columns = _Tiles(starts, block_columns, pieces)
    found = _candidates(rows, columns, pieces, ahead=mask.prefix > 0)
    row, column = np.empty(found.most, np.int64), np.empty(found.most, np.int64)
    full = np.empty(found.most, bool)
    kept = tile_pair_loops.keep_pairs(
        *(rows.number, lengths[rows.sequence], (lengths - targets)[rows.sequence], rows.low, rows.high),
        *(columns.first[rows.sequence], found.begin, found.last, found.passed),
        *(columns.low, columns.high, columns.any_summary, columns.all_summary, found.summaries),
        *(block_rows, block_columns, NO_WINDOW if mask.window is None else mask.window, mask.prefix),
        *(int(pieces is not None), row, column, full),
    )
    row, column, full = row[:kept], column[:kept], full[:kept]
    return TilePairs(rows.sequence[row], rows.number[row], columns.number[column], full)


class _Tiles:
    """Tiles of one size: where they stand, and the segments in them.

    Args:
        starts: of the sequences.
        block: tokens a tile.
        pieces: runs of equal tokens, none of them in two sequences.
    """

    def __init__(self, starts: Ints, block: int, pieces: Pieces | None) -> None:
        lengths = np.diff(starts)
        self.block = block
        self.counts: Ints = -(-lengths // block)
        self.first: Ints = np.cumsum(self.counts) - self.counts
        self.sequence, self.number = numbered(self.counts)
        self.start: Ints = starts[:-1][self.sequence]
        self.begin: Ints = self.start + self.number * block
        self.end: Ints = np.minimum(self.begin + block, starts[1:][self.sequence])
        if pieces is None or not len(self.begin):
            self.low = self.high = self.piece = self.begin
            self.any_summary = self.all_summary = np.zeros(len(self.begin), bool)
            return
        self.piece = np.searchsorted(pieces.starts, self.begin, side="right") - 1
        last = np.searchsorted(pieces.starts, self.end - 1, side="right")
        # Pairs of bounds: every second result is that of a tile, the others of what lies between.
        bounds = np.stack([self.piece, last], axis=1).ravel()
        segment = np.append(pieces.segment, pieces.segment[-1:])
        self.low = np.minimum.reduceat(segment, bounds)[::2].copy()
        self.high = np.maximum.reduceat(segment, bounds)[::2].copy()
        before = np.concatenate([[0], np.cumsum(pieces.summary)])
        of_summaries = before[last] - before[self.piece]
        self.any_summary = of_summaries > 0
        self.all_summary = of_summaries == last - self.piece


class _Candidates(NamedTuple):
    """Column tiles that a row tile may meet: from `begin` to `last`, and `summaries` before them from `passed` on."""

    begin: Ints
    last: Ints
    passed: Ints
    summaries: Ints
    most: int


def _candidates(rows: _Tiles, columns: _Tiles, pieces: Pieces | None, *, ahead: bool) -> _Candidates:
    """Pairs in which something may be seen; never fewer than are needed, and none above the diagonal unless `ahead`.

    Where segments follow each other these are the tiles of a row's own segments, and earlier ones with summaries: of
    five segments a tenth of all pairs, and planning takes as long as there are pairs.
    """
    own = columns.first[rows.sequence]
    seen = columns.counts[rows.sequence] if ahead else (rows.end - 1 - rows.start) // columns.block + 1
    last = own + seen - 1
    begin, summaries = own, np.zeros(0, np.int64)
    if not ahead and pieces is not None and len(own) and _follow(pieces, rows):
        fresh = np.diff(pieces.segment, prepend=-1) != 0
        fresh[rows.piece[rows.number == 0]] = True
        segment_start = pieces.starts[fresh][np.cumsum(fresh) - 1]
        begin = own + (segment_start[rows.piece] - rows.start) // columns.block
        summaries = np.flatnonzero(columns.any_summary)
    passed = np.searchsorted(summaries, own)
    early = np.searchsorted(summaries, begin) - passed
    return _Candidates(begin, last, passed, summaries, int((early + last + 1 - begin).sum()))


def _follow(pieces: Pieces, rows: _Tiles) -> bool:
    """Whether segment numbers never fall inside a sequence."""
    falls = np.diff(pieces.segment, prepend=0) < 0
    falls[rows.piece[rows.number == 0]] = False
    return not falls.any()


def numbered(counts: Ints) -> tuple[Ints, Ints]:
    """For groups of these sizes: the group of every member, and its number inside."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
