"""SegmentRule: how a long sequence is cut into segments with summary tokens, and what that leaves to compute.

    recent = 3, length = 4, summaries = 2, ten events:

    e0 e1 e2 e3 [s s]   e4 e5 e6 [s s]   e7 e8 e9
    segment 0           segment 1        recent

An event sees its own segment up to itself and every summary of earlier segments; so does a summary. Only numbers are
worked out here, without torch: the planner of balanced batches asks for them before anything is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from freescale.errors import ConfigError
from freescale.jagged import group_index

Ints = npt.NDArray[np.int64]


class Segments(NamedTuple):
    """The segments of a batch, in order: which sequence each belongs to, and how many events it holds."""

    sequence: Ints
    sizes: Ints


@dataclass(frozen=True, kw_only=True)
class SegmentRule:
    """The history, all but the latest events, in segments with summary tokens behind each.

    Args:
        recent: latest events of a sequence that stay as they are; sequences up to this long get no summaries.
        length: events of a segment; the last one of a history may be shorter.
        summaries: summary tokens behind each segment.
    """

    recent: int
    length: int
    summaries: int

    def __post_init__(self) -> None:
        for name, least in (("recent", 1), ("length", 1), ("summaries", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"segments.{name} must be at least {least}",
                    got=getattr(self, name),
                    next_step="leave segments.recent out to train on whole histories" if least else None,
                )

    def history(self, lengths: npt.NDArray[np.integer]) -> Ints:
        """Events of each sequence that are cut into segments."""
        return np.maximum(np.asarray(lengths, dtype=np.int64) - self.recent, 0)

    def counts(self, lengths: npt.NDArray[np.integer]) -> Ints:
        """Segments of each sequence."""
        return -(-self.history(lengths) // self.length)

    def tokens(self, lengths: npt.NDArray[np.integer]) -> Ints:
        """Events and summaries of each sequence."""
        return np.asarray(lengths, dtype=np.int64) + self.summaries * self.counts(lengths)

    def pairs(self, lengths: npt.NDArray[np.integer]) -> Ints:
        """Pairs (a token, one that it sees) of each sequence: the work of attention."""
        history = self.history(lengths)
        recent = np.asarray(lengths, dtype=np.int64) - history
        whole, rest = np.divmod(history, self.length)
        full, short = self.length + self.summaries, np.where(rest > 0, rest + self.summaries, 0)
        inside = whole * _causal(full) + _causal(short) + _causal(recent)
        # A segment also sees the summaries of those before it: 0, 1, 2, ... times as many as one has.
        before = full * (whole * (whole - 1) // 2) + short * whole + recent * self.counts(lengths)
        return inside + self.summaries * before

    def cut(self, lengths: npt.NDArray[np.integer]) -> Segments:
        """The segments of sequences of these lengths."""
        return cut_history(self.history(lengths), length=self.length)


def cut_history(history: Ints, *, length: int) -> Segments:
    """Histories of so many events in segments of `length`; the last of each may be shorter."""
    counts = -(-history // length)
    sequence, number = group_index(counts)
    return Segments(sequence, np.minimum(history[sequence] - number * length, length))


def _causal(size: Ints | int) -> Ints:
    return np.asarray(size * (size + 1) // 2)
