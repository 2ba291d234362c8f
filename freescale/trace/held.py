"""Why a rank came late to an exchange: because of its own work, or because a transfer had held it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from freescale.trace.bubbles import Interval, missing_of, overlap, union, without
from freescale.trace.spans import MAIN, Span


def held_before(spans: Sequence[Span], came: Mapping[int, float]) -> dict[int, Interval]:
    """Arrival of this rank -> its longest wait for a transfer since the exchange before, where there was one.

    Waits of the main thread count for all threads: it hands the others their work.

    Args:
        spans: of this rank.
        came: arrival, by its serial number -> when the last rank was ready for that exchange.
    """
    waits = [span for span in spans if span.kind == "wait"]
    lanes = {span.lane: _Lane.of(span.lane, waits, came) for span in waits}
    held: dict[int, Interval] = {}
    for wait in waits:
        if wait.arrival is not None and wait.arrival.serial in came:
            longest = lanes[wait.lane].longest_before(wait.arrival.mark)
            if longest is not None:
                held[wait.arrival.serial] = longest
    return held


class _Lane(NamedTuple):
    """A thread's waits.

    Args:
        transfers: when it, or the main thread, waited for transfers; disjoint, in order.
        starts: their starts.
        ends: of its own exchanges, in order.
        arrivals: since when, at each end, it had been ready for the newest exchange that was over.
    """

    transfers: list[Interval]
    starts: list[float]
    ends: list[float]
    arrivals: list[float]

    @classmethod
    def of(cls, lane: str, waits: Sequence[Span], came: Mapping[int, float]) -> _Lane:
        transfers = union(
            interval
            for wait in waits
            if wait.lane in (MAIN, lane)
            for interval in without([(wait.start, wait.end)], _until_last(wait, came))
        )
        over = sorted((w.end, w.arrival.mark) for w in waits if w.lane == lane and w.arrival is not None)
        arrivals = list(accumulate((mark for _, mark in over), max))
        return cls(transfers, [low for low, _ in transfers], [end for end, _ in over], arrivals)

    def longest_before(self, arrival: float) -> Interval | None:
        """The longest wait for a transfer between an arrival and the one at the exchange before."""
        num_over = bisect_right(self.ends, arrival)
        since = self.arrivals[num_over - 1] if num_over else -float("inf")
        near = self.transfers[max(0, bisect_left(self.starts, since) - 1) : bisect_left(self.starts, arrival)]
        inside = overlap(near, [(since, arrival)])
        return max(inside, key=lambda interval: interval[1] - interval[0], default=None)


def _until_last(wait: Span, came: Mapping[int, float]) -> list[Interval]:
    """The part of a wait in which the last rank was missing; of a wait for another thread nothing is known."""
    if wait.arrival is not None and wait.arrival.serial in came:
        wait = wait._replace(last=came[wait.arrival.serial])
    return missing_of(wait)
