"""When a rank would be where it is if transfers took no time: what it would still wait for is the work of other ranks.

Over a slow wire a rank is late for two reasons: it works longer, or transfers have held it, this one or an earlier one,
in this thread or in another one that it had to wait for. To tell the two apart, every thread (lane) of a rank has an
ideal clock. It runs while the thread runs and stands while the thread waits. When a wait is over it is put forward

    for an exchange      to x, the ideal time at which the last rank came to that exchange
    for another thread   to the ideal time at which that thread had ready what this one goes on with

unless it stands there already. Lateness is handed on, from exchange to exchange and from thread to thread; time on the
wire is not. At an exchange a rank waits for the others from its own ideal time to x, and for the wire otherwise.

No rank knows x alone. But a lane's ideal time is always the latest of some  x(exchange) + work since then  (its
`Paths`), and so is x itself, over all ranks. The longest work of any rank between each two exchanges is one maximum
over the ranks; with it each of them finds every x, one after the other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from freescale.trace.bubbles import Interval, overlap, union, without
from freescale.trace.spans import MAIN, MAX_PENDING, WORK, Span

Paths = dict[int | None, float]
"""Exchange, by the serial number of this rank's arrival -> seconds of work since it; under None, an ideal time."""

K = TypeVar("K")

_NEVER = -float("inf")

_KEPT = 64
"""Waits of a thread that are remembered when their time has been accounted for: those of some steps."""


class IdealClocks:
    """The ideal clocks of one rank: hears its spans, and what the ranks found out together about its exchanges.

    clocks.hear(spans)
    ended = clocks.due(until)            # waits whose exchanges are to be compared now
    paths = clocks.paths(came)           # what leads to each of them, to be maximised over the ranks
    clocks.set_ideal(ideal)              # x of each of them
    clocks.missing(wait, ideal)          # when that wait was for another rank
    """

    def __init__(self) -> None:
        self._backlog: list[Span] = []
        self._due: list[Span] = []
        self._lanes: dict[str, _Lane] = {}
        self._linked: set[str] = set()
        self._waits: list[Interval] = []

    def hear(self, spans: Iterable[Span]) -> None:
        """Spans that nobody has told of before."""
        heard = [span for span in spans if span.kind != "stage"]
        self._linked.update(span.lane for span in heard if span.kind == "handover")
        self._backlog = [*self._backlog, *heard][-MAX_PENDING:]

    def due(self, until: float) -> list[Span]:
        """Waits of this rank that ended exchanges up to a moment, as they can be compared with those of other ranks.

        How far another thread has come at a moment is a matter of chance, and may differ from rank to rank. What the
        main thread has taken over from it by then is not.
        """
        joined = dict.fromkeys(self._linked, _NEVER)
        for span in self._backlog:
            if (
                span.kind == "handover"
                and span.lane == MAIN
                and span.end <= until
                and span.arrival is not None
            ):
                joined[span.arrival.name] = max(joined.get(span.arrival.name, _NEVER), span.arrival.mark)
        joined[MAIN] = until
        now: list[Span] = []
        later: list[Span] = []
        for span in self._backlog:
            (now if span.end <= joined.get(span.lane, until) else later).append(span)
        self._due, self._backlog = sorted(now, key=lambda span: span.end), later
        return [span for span in self._due if _ends_exchange(span)]

    def paths(self, came: Mapping[int, float], *, offset: float = 0.0) -> dict[int, Paths]:
        """What leads to this rank's arrival at each exchange that is due.

        Args:
            came: arrival -> when the last rank was there, by this rank's clock.
            offset: between this clock and that of all ranks, where ideal clocks start.
        """
        self._open_lanes(offset)
        found: dict[int, Paths] = {}
        for span in self._due:
            lane = self._lanes[span.lane]
            if not lane.moments and span.kind != "handover":
                # Nobody gave it work that is known of: it begins where the main thread stands.
                lane.put(span.start, self._lanes[MAIN].at(span.start))
            if span.kind == "handover" and span.arrival is not None:
                source = self._lanes.get(span.arrival.name)
                if source is not None and source is not lane:
                    lane.put(span.end, _latest(lane.at(span.start), source.at(span.arrival.mark)))
            elif _ends_exchange(span) and span.arrival is not None:
                serial = span.arrival.serial
                came_here = span.arrival.mark
                path = found[serial] = lane.at(came_here)
                if lane.works_at(span.end):
                    continue  # so it was another stream that waited
                before = path if came_here == span.start else lane.at(span.start)
                if not lane.worked(came_here, span.start):
                    # All of them lead to the exchange, too, and it is the later one.
                    before = {start: value for start, value in before.items() if start not in path}
                # A rank that needs nothing from the last one may leave before it has come.
                left_early = min(0.0, span.end - came.get(serial, span.end))
                lane.put(span.end, {**before, serial: left_early})
        return found

    def set_ideal(self, ideal: Mapping[int, float]) -> None:
        """The exchanges that were due have their ideal times: from here on, so have the lanes."""
        for lane in self._lanes.values():
            lane.set_ideal(ideal)
        waits = list(self._waits)
        for span in self._due:
            if span.lane != MAIN and _ends_exchange(span) and span.arrival is not None:
                begun, x = self._lanes[span.lane].time(span.start), ideal.get(span.arrival.serial, _NEVER)
                if x > begun:
                    waits.append((begun, x))
        self._waits = union(waits)
        oldest = min((_begin(span) for span in (*self._due, *self._backlog)), default=_NEVER)
        for lane in self._lanes.values():
            lane.forget_before(oldest)
        if MAIN in self._lanes:
            begin = self._lanes[MAIN].time(self._lanes[MAIN].moments[0])
            self._waits = [wait for wait in self._waits if wait[1] > begin]
        self._due = []

    def missing(self, wait: Span, ideal: float | None) -> tuple[Interval, ...]:
        """When a wait was for another rank: as long as without transfers, and at its beginning.

        Args:
            wait: at an exchange that has its ideal time, or of the main thread for another one.
            ideal: x of that exchange; None where there is none.
        """
        if wait.lane not in self._lanes:
            return ()
        begun = self._lanes[wait.lane].time(wait.start)
        if ideal is not None:
            seconds = ideal - begun
        else:
            # The other thread may have had work of its own to do; only what it waited for ranks counts.
            over = self._lanes[wait.lane].time(wait.end)
            seconds = (
                sum(high - low for low, high in overlap([(begun, over)], self._waits))
                if over > begun
                else 0.0
            )
        return ((wait.start, min(wait.end, wait.start + seconds)),) if seconds > 0 else ()

    def _open_lanes(self, offset: float) -> None:
        by_lane: dict[str, list[Span]] = {}
        for span in self._due:
            by_lane.setdefault(span.lane, []).append(span)
        if MAIN not in self._lanes and self._due:
            begin = min(span.start for span in self._due)
            self._lanes[MAIN] = _Lane()
            self._lanes[MAIN].put(begin, {None: begin + offset})
        for name, spans in by_lane.items():
            self._lanes.setdefault(name, _Lane()).hear(spans)


class _Lane:
    """A thread: when it ran, and what led to where it is, from each moment at which it went on after a wait.

    Its paths are kept less the time it had run by then: so they hold at every moment until the next.
    """

    def __init__(self) -> None:
        self.moments: list[float] = []
        self._paths: list[Paths] = []
        self._held: list[Interval] = []
        self._begun: list[float] = []
        self._sums: list[float] = [0.0]
        self._work: list[Interval] = []
        self._work_ends: list[float] = []

    def hear(self, spans: Sequence[Span]) -> None:
        """Its waits and its work; where both are told of a moment (streams of a GPU), it worked."""
        self._work = union([*self._work, *((span.start, span.end) for span in spans if span.kind in WORK)])
        self._work_ends = [high for _, high in self._work]
        stood = union([*self._held, *((span.start, span.end) for span in spans if span.kind not in WORK)])
        self._count(without(stood, self._work), before=self._sums[0])

    def at(self, moment: float) -> Paths:
        """What leads to a moment."""
        if not self.moments:
            return {}
        ran = self._ran(moment)
        return {start: seconds + ran for start, seconds in self._paths_at(moment).items()}

    def time(self, moment: float) -> float:
        """Its ideal time, of a moment before which all exchanges have theirs."""
        return self._paths_at(moment)[None] + self._ran(moment)

    def put(self, moment: float, paths: Paths) -> None:
        """It goes on at a moment, the latest so far."""
        ran = self._ran(moment)
        self.moments.append(max(moment, self.moments[-1]) if self.moments else moment)
        self._paths.append({start: seconds - ran for start, seconds in paths.items()})

    def works_at(self, moment: float) -> bool:
        """Whether it is in the middle of some work."""
        return self.worked(moment, moment)

    def worked(self, start: float, end: float) -> bool:
        """Whether there was work between two moments."""
        place = bisect_right(self._work_ends, start)
        return place < len(self._work) and self._work[place][0] < end

    def set_ideal(self, ideal: Mapping[int, float]) -> None:
        """Paths become ideal times."""
        for place, paths in enumerate(self._paths):
            if len(paths) > 1 or None not in paths:
                times = (
                    more if start is None else more + ideal.get(start, _NEVER)
                    for start, more in paths.items()
                )
                self._paths[place] = {None: max(times, default=_NEVER)}

    def forget_before(self, moment: float) -> None:
        """Nobody will ask about earlier moments; but exchanges may be under way that were begun a little before."""
        place = bisect_right(self.moments, moment) - 1 - _KEPT
        if place <= 0:
            return
        del self.moments[:place], self._paths[:place]
        num_over = bisect_right(self._held, self.moments[0], key=lambda interval: interval[1])
        self._count(self._held[num_over:], before=self._sums[num_over])
        num_over = bisect_right(self._work_ends, self.moments[0])
        del self._work[:num_over], self._work_ends[:num_over]

    def _paths_at(self, moment: float) -> Paths:
        return self._paths[max(0, bisect_right(self.moments, moment) - 1)]

    def _count(self, held: list[Interval], *, before: float) -> None:
        self._held = held
        self._begun = [low for low, _ in held]
        self._sums = list(accumulate((high - low for low, high in held), initial=before))

    def _ran(self, moment: float) -> float:
        """The clock that stands while the thread does."""
        place = bisect_left(self._begun, moment)
        ran = moment - self._sums[place]
        if place and (end := self._held[place - 1][1]) > moment:
            return ran + end - moment
        return ran


def ideal_times(longest: Mapping[K, Mapping[K | None, float]], order: Iterable[K]) -> dict[K, float]:
    """The ideal time of every exchange.

    Args:
        longest: exchange -> an exchange before it -> the longest work of any rank between the two; under None, the
            latest ideal time of any rank that an earlier comparison has found.
        order: of the exchanges; what leads to one stands before it.
    """
    found: dict[K | None, float] = {None: 0.0}
    for key in order:
        found[key] = max(
            (found.get(start, _NEVER) + more for start, more in longest[key].items()), default=_NEVER
        )
    return {key: value for key, value in found.items() if key is not None}


def _begin(span: Span) -> float:
    return span.start if span.arrival is None else min(span.start, float(span.arrival.mark))


def _ends_exchange(span: Span) -> bool:
    return span.kind == "wait" and span.arrival is not None and span.over


def _latest(some: Paths, others: Paths) -> Paths:
    return {start: max(some.get(start, _NEVER), others.get(start, _NEVER)) for start in {**some, **others}}
