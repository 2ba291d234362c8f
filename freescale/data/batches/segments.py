"""Puts summary tokens into a jagged batch: the places of events and summaries, and what a mask must know of them.

Places count through the summaries: the first event after a segment of 350 events and 4 summaries has place 354. So a
place is where a token stands in the kernel, distances between places are what the relative position bias is indexed
by, and neither depends on what comes later. A summary carries the time of its segment's last event, as a key and as
a query: it must not know when the next event comes, or a segment could not be compressed before it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.data.batches.segment_rule import Ints, Segments
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.jagged import offsets_of
from freescale.kernels import AttentionMask
from freescale.kernels.attention import Pieces
from freescale.kernels.runtime import to_device


@dataclass(frozen=True)
class SegmentedBatch:
    """A batch with room for summaries; its tensors are where the vectors of the batch live.

    Args:
        batch: offsets of the sequences with their summaries; "time" and "target_time" where the events have them.
        events: [T] place of every event in the new batch.
        summaries: [segments * k] place of every summary, segment by segment.
        codes: [T + segments * k] number of a token's segment inside its sequence, times two, plus one for summaries.
        pieces: the same for runs of equal tokens, on the CPU.
    """

    batch: SequenceBatch
    events: Tensor
    summaries: Tensor
    codes: Tensor
    pieces: Pieces

    @property
    def segment(self) -> Tensor:
        """[T + segments * k] number of the segment inside its sequence."""
        return self.codes >> 1

    @property
    def is_summary(self) -> Tensor:
        """[T + segments * k]."""
        return (self.codes & 1).bool()

    @cached_property
    def mask(self) -> AttentionMask | None:
        """What a token sees; None where there are no summaries, and so nothing but what came before."""
        if not len(self.summaries):
            return None
        return AttentionMask(segments=self.segment, summaries=self.is_summary, pieces=self.pieces)


def insert_summaries(
    batch: SequenceBatch, segments: Segments, *, summaries: int, device: torch.device | str
) -> SegmentedBatch:
    """A batch with `summaries` tokens behind each of these segments; what follows the last one is the recent part.

    Only runs of tokens are counted here, some ten a sequence. What is wanted for every token is written out of them on
    the device: a million of them, 256 histories of 4,096, would take the CPU longer than a GPU needs for the model.

    Args:
        batch: events.
        segments: where they are cut.
        summaries: tokens a segment.
        device: where the vectors of the batch live.
    """
    cut = _cut(batch.offsets.numpy(), segments, summaries=summaries)
    behind = cut.starts[cut.summary]
    tokens = (behind[:, None] + np.arange(summaries)).ravel()
    # Summaries that stand before a run of events push it back.
    moved = cut.starts[~cut.summary] - np.cumsum(cut.sizes[~cut.summary]) + cut.sizes[~cut.summary]
    table = to_device(
        *(moved, cut.sizes[~cut.summary], 2 * cut.segment + cut.summary, cut.sizes, tokens),
        device=torch.device(device),
    )
    events = _spread(table[0], table[1], batch.num_tokens)
    events += torch.arange(batch.num_tokens, device=events.device)
    total = batch.num_tokens + len(tokens)
    return SegmentedBatch(
        batch=SequenceBatch(
            offsets=torch.from_numpy(cut.offsets),
            tokens=_times(batch, events=events, summaries=table[4], each=summaries),
            samples=batch.samples,
        ),
        events=events,
        summaries=table[4],
        codes=_spread(table[2], table[3], total),
        pieces=Pieces(cut.starts, cut.segment, cut.summary),
    )


class _Cut(NamedTuple):
    """Runs of events and of summaries, in order: first token, tokens, segment, kind; and where sequences start."""

    starts: Ints
    sizes: Ints
    segment: Ints
    summary: np.ndarray[tuple[int], np.dtype[np.bool_]]
    offsets: Ints


def _cut(offsets: Ints, segments: Segments, *, summaries: int) -> _Cut:
    """Every sequence as runs: the events of a segment, its summaries, ..., the recent events."""
    sequence, sizes = segments
    lengths = np.diff(offsets)
    counts = np.bincount(sequence, minlength=len(lengths))
    earlier = np.cumsum(counts) - counts
    recent = 2 * (earlier + counts) + np.arange(len(lengths))
    run = 2 * np.arange(len(sequence)) + sequence
    size = np.empty(2 * len(sequence) + len(lengths), np.int64)
    size[run], size[run + 1] = sizes, summaries
    size[recent] = lengths - np.bincount(sequence, weights=sizes, minlength=len(lengths)).astype(np.int64)
    segment = np.empty_like(size)
    segment[run] = segment[run + 1] = np.arange(len(sequence)) - earlier[sequence]
    segment[recent] = counts
    summary = np.zeros(len(size), bool)
    summary[run + 1] = True
    some = size > 0
    size = size[some]
    new = offsets_of(lengths + summaries * counts)
    return _Cut(np.cumsum(size) - size, size, segment[some], summary[some], new)


def _spread(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """Each value as often as its count says; the total is known, so that nothing waits for the device."""
    return torch.repeat_interleave(values, counts, output_size=total)


def _times(batch: SequenceBatch, *, events: Tensor, summaries: Tensor, each: int) -> dict[str, Tensor]:
    """Times of events and summaries: an event its own, a summary that of the event before its run, in both senses."""
    if "time" not in batch.tokens:
        return {}
    time, asked = (batch.tokens[name].to(events.device) for name in ("time", "target_time"))
    total = len(events) + len(summaries)
    keys = time.new_empty(total).index_copy_(0, events, time)
    queries = asked.new_empty(total).index_copy_(0, events, asked)
    last = keys.index_select(0, summaries[::each] - 1).repeat_interleave(each, output_size=len(summaries))
    return {
        "time": keys.index_copy_(0, summaries, last),
        "target_time": queries.index_copy_(0, summaries, last),
    }
