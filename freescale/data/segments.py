"""Puts summary tokens into a jagged batch: the places of events and summaries, and what a mask must know of them.

Places count through the summaries: the first event after a segment of 350 events and 4 summaries has place 354. So a
place is where a token stands in the kernel, distances between places are what the relative position bias is indexed
by, and neither depends on what comes later. A summary carries the time of its segment's last event, as a key and as
a query: it must not know when the next event comes, or a segment could not be compressed before it does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freescale.data.segment_rule import Ints, Segments
from freescale.data.sequence_batch import SequenceBatch


@dataclass(frozen=True)
class SegmentedBatch:
    """A batch with room for summaries.

    Args:
        batch: offsets of the sequences with their summaries; "time" and "target_time" where the events have them.
        events: [T] place of every event in the new batch, on the device of the features.
        summaries: [segments * k] place of every summary, segment by segment.
        segment: [T + segments * k] number of the segment inside its sequence, on the CPU.
        is_summary: [T + segments * k] on the CPU.
    """

    batch: SequenceBatch
    events: Tensor
    summaries: Tensor
    segment: Tensor
    is_summary: Tensor


def insert_summaries(
    batch: SequenceBatch, segments: Segments, *, summaries: int, device: torch.device | str
) -> SegmentedBatch:
    """A batch with `summaries` tokens behind each of these segments; what follows the last one is the recent part.

    Args:
        batch: events.
        segments: where they are cut.
        summaries: tokens a segment.
        device: where the vectors of the batch live.
    """
    offsets = batch.offsets.numpy()
    ends = segment_ends(offsets, segments)
    events = np.arange(batch.num_tokens)
    # Segments that end before an event push it back.
    passed = np.searchsorted(ends, events, side="right")
    places = events + summaries * passed
    behind = ends + summaries * np.arange(len(ends))
    tokens = (behind[:, None] + np.arange(summaries)).ravel()
    earlier = np.searchsorted(segments.sequence, np.arange(len(batch) + 1))
    sequence = np.repeat(np.arange(len(batch)), np.diff(offsets))
    total = batch.num_tokens + len(tokens)
    segment, is_summary = np.empty(total, np.int64), np.zeros(total, bool)
    segment[places] = passed - earlier[sequence]
    segment[tokens] = np.repeat(np.arange(len(ends)) - earlier[segments.sequence], summaries)
    is_summary[tokens] = True
    # The event a token takes its time from: an event from itself, a summary from the last of its segment.
    source = np.empty(total, np.int64)
    source[places], source[tokens] = events, np.repeat(ends - 1, summaries)
    on_device = [torch.from_numpy(x).to(device, non_blocking=True) for x in (places, tokens, source)]
    return SegmentedBatch(
        batch=SequenceBatch(
            offsets=torch.from_numpy(offsets + summaries * earlier),
            tokens=_times(batch, source=on_device[2], is_summary=is_summary),
        ),
        events=on_device[0],
        summaries=on_device[1],
        segment=torch.from_numpy(segment),
        is_summary=torch.from_numpy(is_summary),
    )


def segment_ends(offsets: Ints, segments: Segments) -> Ints:
    """Number, in the flat batch, of the event after each segment."""
    total = np.cumsum(segments.sizes)
    first = np.searchsorted(segments.sequence, segments.sequence)
    before = np.concatenate([[0], total])[first]
    return offsets[:-1][segments.sequence] + total - before


def _times(
    batch: SequenceBatch, *, source: Tensor, is_summary: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> dict[str, Tensor]:
    if "time" not in batch.tokens:
        return {}
    time = batch.tokens["time"].index_select(0, source)
    asked = batch.tokens["target_time"].index_select(0, source)
    own = torch.from_numpy(is_summary).to(time.device, non_blocking=True)
    return {"time": time, "target_time": torch.where(own, time, asked)}
