"""Where the time of a step goes on a rank, exactly: compute, straggler, comm, host.

T is the time between the ends of two successive optimizer steps. Every moment of it is one of

    compute    some thread or stream of the rank does useful work; on a GPU, a kernel or copy of it runs
    straggler  the rank stands at an exchange for which some rank is not ready yet, or at which one stands still
    comm       it stands at an exchange that all ranks have reached: the transfer is what it waits for
    host       the rest: reading data, Python, launching kernels; a device that has nothing to run

so the four add up to T. The bubble is 1 - compute / T. Standing inside a collective is never work, also where it keeps
a GPU spinning. Only waits of the main thread (or stream) count: what a communication thread waits for is hidden as long
as the main thread has something to do, and is host time where the main thread has neither work nor a wait.

What is recorded of a GPU's work are stretches between two moments of its stream, with gaps inside where the host was
slow. Whoever knows how long the device worked in them (`train/accounts/busy.py`) says so, and gaps become host time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from freescale.trace.spans import MAIN, WORK, Span

CAUSES = ("straggler", "comm", "host")

Interval = tuple[float, float]


@dataclass(frozen=True)
class Parts:
    """Seconds of one rank, over a step or many."""

    total: float
    compute: float
    straggler: float
    comm: float

    @property
    def host(self) -> float:
        """What is left of the total."""
        return self.total - self.compute - self.straggler - self.comm

    @property
    def bubble(self) -> float:
        """The share of the total in which nothing was computed."""
        return 1 - self.compute / self.total if self.total > 0 else 0.0

    def share(self, cause: str) -> float:
        """One part as a share of the total."""
        return float(getattr(self, cause)) / self.total if self.total > 0 else 0.0

    def shares(self) -> dict[str, float]:
        """The fields of a log line; the causes add up to the bubble."""
        causes = {cause: self.share(cause) for cause in CAUSES}
        return {"bubble": sum(causes.values()), **causes}


class Lengths(NamedTuple):
    """Seconds of a step of one rank, as its spans tell them.

    Args:
        total: of the step.
        stretches: of work, those of replays included.
        replays: of replays alone, which have no gaps.
        straggler: waits for other ranks, outside of all stretches.
        exposed: all waits, outside of all stretches.
    """

    total: float
    stretches: float
    replays: float
    straggler: float
    exposed: float

    def parts(self, busy: Callable[[float, float], float] | None = None) -> Parts:
        """Where the time went.

        Args:
            busy: (seconds of stretches without replays, seconds of replays) -> seconds that the device worked in the
                first; all unless given.
        """
        compute, beside = self.stretches, self.stretches - self.replays
        if busy is not None:
            compute = self.replays + min(beside, busy(beside, self.replays))
        return Parts(self.total, compute, self.straggler, self.exposed - self.straggler)


def split_step(
    start: float, end: float, spans: Iterable[Span], *, busy: Callable[[float, float], float] | None = None
) -> Parts:
    """Account for the time from `start` to `end` of one rank; see `lengths_of` and `Lengths.parts`."""
    return lengths_of(start, end, spans).parts(busy)


def lengths_of(start: float, end: float, spans: Iterable[Span]) -> Lengths:
    """Measure the time from `start` to `end` of one rank.

    Args:
        start: end of the last optimizer step, in seconds of this rank's clock.
        end: end of this one.
        spans: of any time; only what lies between the two counts. A wait whose last arrival is not known is comm.
    """
    inside = [span for span in spans if span.kind != "stage" and span.end > start and span.start < end]
    stretches = union([(max(start, s.start), min(end, s.end)) for s in inside if s.kind in WORK])
    replays = union([(max(start, s.start), min(end, s.end)) for s in inside if s.kind == "replay"])
    waits = [span for span in inside if span.kind == "wait" and span.lane == MAIN]
    if not waits:
        return Lengths(end - start, _length(stretches), _length(replays), 0.0, 0.0)
    exposed = without(union((max(start, w.start), min(end, w.end)) for w in waits), stretches)
    missing = union(
        (max(start, low), min(end, high)) for wait in waits for low, high in _some_rank_missing(wait, inside)
    )
    straggler = without(missing, stretches)
    return Lengths(end - start, _length(stretches), _length(replays), _length(straggler), _length(exposed))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same moments."""
    merged: list[Interval] = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1]:
            if high > merged[-1][1]:
                merged[-1] = (merged[-1][0], high)
        elif high > low:
            merged.append((low, high))
    return merged


def without(intervals: Sequence[Interval], cover: Sequence[Interval]) -> list[Interval]:
    """What a cover leaves of some intervals; both disjoint and in order, and so is the result."""
    left: list[Interval] = []
    place = 0
    for low, high in intervals:
        while place < len(cover) and cover[place][1] <= low:
            place += 1
        ahead = place
        while ahead < len(cover) and cover[ahead][0] < high:
            if cover[ahead][0] > low:
                left.append((low, cover[ahead][0]))
            low = max(low, cover[ahead][1])
            ahead += 1
        if low < high:
            left.append((low, high))
    return left


def overlap(intervals: Sequence[Interval], cover: Sequence[Interval]) -> list[Interval]:
    """What a cover has in common with some intervals; both disjoint and in order, and so is the result."""
    return without(intervals, without(intervals, cover))


def missing_of(wait: Span) -> list[Interval]:
    """When a wait at an exchange was for another rank; disjoint and in order."""
    if wait.missing is not None:
        return list(wait.missing)
    return [] if wait.last is None else union([(wait.start, min(wait.end, wait.last))])


def total(parts: Iterable[Parts]) -> Parts:
    """Many steps, or many ranks, as one: times are added, so long steps weigh more."""
    totals = [0.0, 0.0, 0.0, 0.0]
    for one in parts:
        for place, value in enumerate((one.total, one.compute, one.straggler, one.comm)):
            totals[place] += value
    return Parts(*totals)


@dataclass(frozen=True)
class Slowest:
    """The rank the others wait for, and what it does while they wait."""

    rank: int
    cause: str
    excess: float


def slowest(ranks: Sequence[Parts]) -> Slowest | None:
    """Who is waited for: the rank that waits least for others. None where nobody waits for anybody.

    The cause is the part in which that rank exceeds the mean of all ranks most, `excess` by how much of the step.
    """
    if len(ranks) < 2 or not sum(one.straggler for one in ranks) > 0:
        return None
    rank = min(range(len(ranks)), key=lambda r: (ranks[r].share("straggler"), r))
    excess = {
        cause: ranks[rank].share(cause) - sum(one.share(cause) for one in ranks) / len(ranks)
        for cause in ("compute", "comm", "host")
    }
    cause = max(excess, key=lambda name: excess[name])
    return Slowest(rank, cause, excess[cause])


def _some_rank_missing(wait: Span, spans: Sequence[Span]) -> list[Interval]:
    """The part of a wait in which it was for another rank."""
    if wait.arrival is not None or wait.missing is not None:
        return missing_of(wait)
    # The main thread waits for another thread, and nobody has looked closer: what that one waits for is the cause.
    others = (other for other in spans if other.kind == "wait" and other.lane != MAIN)
    return overlap([(wait.start, wait.end)], union(each for other in others for each in missing_of(other)))


def _length(intervals: Iterable[Interval]) -> float:
    return sum([high - low for low, high in intervals])
