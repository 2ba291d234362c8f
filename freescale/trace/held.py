"""Why a rank came late to an exchange: because of its own work, or because a transfer had held it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from freescale.trace.bubbles import Interval, missing_of, union, without
from freescale.trace.spans import MAIN, Span


def held_before(
    spans: Sequence[Span], came: Mapping[int, float], *, late: Collection[int]
) -> dict[int, Interval]:
    """Late arrival of this rank -> its longest wait for a transfer since the exchange before, where there was one.

    Waits of the main thread count for all threads: it hands the others their work.

    Args:
        spans: of this rank.
        came: arrival, by its serial number -> when the last rank was ready for that exchange.
        late: those that were the last.
    """
    waits = [span for span in spans if span.kind == "wait"]
    lanes = {lane: _Lane.of(lane, waits, came) for lane in {span.lane for span in waits}}
    held: dict[int, Interval] = {}
    for wait in waits:
        if wait.arrival is not None and wait.arrival.serial in late:
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
            interval for wait in waits if wait.lane in (MAIN, lane) for interval in _transfers(wait, came)
        )
        over = sorted((w.end, w.arrival.mark) for w in waits if w.lane == lane and w.arrival is not None)
        arrivals = list(accumulate((mark for _, mark in over), max))
        return cls(transfers, [low for low, _ in transfers], [end for end, _ in over], arrivals)

    def longest_before(self, arrival: float) -> Interval | None:
        """The longest wait for a transfer between an arrival and the one at the exchange before."""
        num_over = bisect_right(self.ends, arrival)
        since = self.arrivals[num_over - 1] if num_over else -float("inf")
        near = self.transfers[max(0, bisect_left(self.starts, since) - 1) : bisect_left(self.starts, arrival)]
        inside = [(max(low, since), min(high, arrival)) for low, high in near]
        longest = max(inside, key=lambda interval: interval[1] - interval[0], default=(0.0, 0.0))
        return longest if longest[0] < longest[1] else None


def _transfers(wait: Span, came: Mapping[int, float]) -> list[Interval]:
    """The part of a wait in which no rank was missing; all of a wait for another thread, of which nothing is known."""
    if wait.arrival is None or wait.missing is not None:
        return without([(wait.start, wait.end)], missing_of(wait))
    last = came.get(wait.arrival.serial, wait.start)
    return [(max(wait.start, last), wait.end)] if last < wait.end else []
