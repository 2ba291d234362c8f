"""What the ranks tell each other about their exchanges: who kept whom waiting, and when.

A rank alone cannot tell whether it waits for a transfer or for another rank. It waits for a rank

    for as long as it would without transfers   because another one works longer (`trace/ideal.py`)
    while another one stands still              stopped or without a core, also where it has long been there

and for transfers at all other moments. That matters where the wire is slow: a rank that a transfer has held for 20 ms
comes 20 ms late to the next exchange, and only the wire is to blame. A rank that stands still itself waits for nothing.

Nothing here reaches other ranks: what they have to be asked is yielded, and goes on with the answer. So whoever has a
connection to them may ask while others wait for nothing (`accounting.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from freescale.trace import (
    MAIN,
    Arrival,
    IdealClocks,
    Interval,
    Paths,
    Span,
    ideal_times,
    overlap,
    union,
    without,
)

_SLOTS = 64
"""Exchanges a step that can be compared; a step of the plain schedule has five."""

_PATHS = 4
"""Ways that lead to an exchange: from the one before it in the same thread, from those that other threads had behind
them, and from the last comparison."""

_NEVER = -float("inf")

Key = tuple[int, str, int]
"""An exchange: step, name, and which one of that name in that step."""

Numbers = tuple[float, ...]

T = TypeVar("T")


class Ask(NamedTuple):
    """What other ranks are asked: the largest of each of their numbers, or what every one of them has."""

    kind: str
    mine: Any


Answers = Generator[Ask, Any, T]
"""Asks, goes on with the answer, and comes to T; every rank asks the same, in the same order."""


class _Last(NamedTuple):
    """The last rank at an exchange: when it came, by this rank's clock, and its ideal time."""

    came: float
    ideal: float


@dataclass(kw_only=True)
class Notes:
    """Compares the exchanges of this rank with those of the others; every rank must do so at the same steps.

    Args:
        rank: this one.
        offset: what to add to this rank's clock.
    """

    rank: int
    offset: float = 0.0
    _clocks: IdealClocks = field(default_factory=IdealClocks)
    _known: dict[int, _Last] = field(default_factory=dict)
    _own_stalls: list[Interval] = field(default_factory=list)
    _other_stalls: list[Interval] = field(default_factory=list)

    def hear(self, spans: Iterable[Span]) -> None:
        """Spans of this rank, each told of once, before they are compared."""
        self._clocks.hear(spans)

    def begin(self) -> None:
        """Training goes on after a break in which nothing was recorded."""
        self._clocks = IdealClocks()

    def compare(
        self, spans: list[Span], *, steps: range, done: int, until: float, stalls: Sequence[Interval] = ()
    ) -> Answers[int]:
        """Fill in whom the waits of some steps were for; returns the last step that every rank has behind it.

        Args:
            spans: all of this rank that lie in steps not closed yet; changed.
            steps: that are to be accounted for.
            done: the newest that this rank has behind it.
            until: when that one ended.
            stalls: when this process stood still.
        """
        self._own_stalls = union([*self._own_stalls, *stalls])
        arrivals = _keyed(self._clocks.due(until))
        table = _Table(arrivals, num_steps=len(steps))
        mine = {key: arrival.mark + self.offset for key, arrival in arrivals.items()}
        came, (behind, stalled) = yield from table.maxima(mine, extra=(-done, float(len(stalls))))
        last = {arrivals[key].serial: at - self.offset for key, at in came.items()}
        paths = self._clocks.paths(last, offset=self.offset)
        ideal = yield from table.agreed(
            {key: paths[arrival.serial] for key, arrival in arrivals.items()}, arrivals
        )
        if stalled:
            yield from self._hear_of_stalls(stalls)
        self._clocks.set_ideal(ideal)
        self._known = {serial: _Last(at, ideal[serial]) for serial, at in last.items()}
        spans[:] = [piece for span in spans for piece in self._awake(self._recalled(span, until))]
        self._forget_stalls_before(min((span.start for span in spans), default=0.0))
        return int(-behind)

    def _recalled(self, span: Span, until: float) -> Span:
        """A wait with what is known now: when it was for another rank."""
        if span.kind != "wait" or span.missing is not None:
            return span
        last = None if span.arrival is None else self._known.get(span.arrival.serial)
        if last is None and (span.arrival is not None or span.lane != MAIN or span.end > until):
            return span
        late = self._clocks.missing(span, None if last is None else last.ideal)
        if self._other_stalls and last is not None:
            late = tuple(union([*late, *overlap([(span.start, span.end)], self._other_stalls)]))
        came = None if last is None else last.came
        return Span(*span[:7], last=came, missing=late, over=span.over)  # a tenth of what `_replace` takes

    def _awake(self, span: Span) -> Iterable[Span]:
        """The pieces of a wait in which this rank did not stand still itself."""
        if span.kind != "wait" or not self._own_stalls:
            return [span]
        if span.arrival is not None and span.missing is None:
            return [span]  # it is not known yet whom it was for
        pieces = without([(span.start, span.end)], self._own_stalls)
        late = None if span.missing is None else list(span.missing)
        return [
            span._replace(
                start=low, end=high, missing=None if late is None else tuple(overlap([(low, high)], late))
            )
            for low, high in pieces
        ]

    def _hear_of_stalls(self, mine: Sequence[Interval]) -> Answers[None]:
        told = [(low + self.offset, high + self.offset) for low, high in mine]
        everybody: list[list[Interval]] = yield Ask("everybody", told)
        others = (stalls for rank, stalls in enumerate(everybody) if rank != self.rank)
        heard = [(low - self.offset, high - self.offset) for stalls in others for low, high in stalls]
        self._other_stalls = union([*self._other_stalls, *heard])

    def _forget_stalls_before(self, moment: float) -> None:
        self._own_stalls = [stall for stall in self._own_stalls if stall[1] > moment]
        self._other_stalls = [stall for stall in self._other_stalls if stall[1] > moment]


class _Table:
    """The exchanges that are compared now, in one order on every rank.

    Args:
        keys: the exchanges of this rank.
        num_steps: how many steps they belong to, the same on every rank.
    """

    def __init__(self, keys: Iterable[Key], *, num_steps: int) -> None:
        self._size = _SLOTS * num_steps
        self._keys = sorted(keys)[: self._size]
        self._alike = False

    def maxima(
        self, mine: Mapping[Key, float], *, extra: Numbers
    ) -> Answers[tuple[dict[Key, float], list[float]]]:
        """The largest of all ranks' numbers: for each exchange of this rank, and for the extra ones.

        One size for all, and small, where every rank has seen the same exchanges; by name where not.
        """
        numbers = [mine[key] for key in self._keys] + [_NEVER] * (self._size - len(self._keys))
        check = _check(self._keys)
        largest: list[float] = yield Ask("largest", [*extra, check, -check, *numbers])
        further, (high, low), largest = (
            largest[: len(extra)],
            largest[len(extra) :][:2],
            largest[len(extra) + 2 :],
        )
        self._alike = high == -low
        if self._alike:
            return dict(zip(self._keys, largest)), further
        everybody = yield Ask("everybody", {key: mine[key] for key in self._keys})
        return {key: max(other[key] for other in everybody if key in other) for key in self._keys}, further

    def agreed(self, mine: Mapping[Key, Paths], arrivals: Mapping[Key, Arrival]) -> Answers[dict[int, float]]:
        """Arrival -> the ideal time of its exchange, from what leads to each on any rank."""
        key_of: dict[int | None, Key | None] = {None: None}
        key_of.update((arrival.serial, key) for key, arrival in arrivals.items())
        longest = yield from self._longest(
            {key: {key_of[start]: mine[key][start] for start in _few(mine[key])} for key in self._keys}
        )
        order = sorted(self._keys, key=lambda key: arrivals[key].serial)
        return {arrivals[key].serial: ideal for key, ideal in ideal_times(longest, order).items()}

    def _longest(
        self, mine: Mapping[Key, Mapping[Key | None, float]]
    ) -> Answers[Mapping[Key, Mapping[Key | None, float]]]:
        if self._alike:
            starts = {key: sorted(mine[key], key=lambda start: start or ()) for key in self._keys}
            check = _check(starts.items())
            numbers = [mine[key][start] for key in self._keys for start in starts[key]]
            numbers += [_NEVER] * (_PATHS * len(self._keys) - len(numbers))
            high, low, *largest = yield Ask("largest", [check, -check, *numbers])
            if high == -low:
                found = iter(largest)
                return {key: {start: next(found) for start in starts[key]} for key in self._keys}
        everybody = yield Ask("everybody", mine)
        merged: dict[Key, dict[Key | None, float]] = {key: {} for key in self._keys}
        for other in everybody:
            for key in self._keys:
                for start, seconds in other.get(key, {}).items():
                    merged[key][start] = max(seconds, merged[key].get(start, _NEVER))
        return merged


def _few(paths: Paths) -> list[int | None]:
    """As many as travel: what is known for sure, and the newest."""
    newest = sorted(start for start in paths if start is not None)
    return [None, *newest[1 - _PATHS :]] if None in paths else list(newest[-_PATHS:])


def _check(names: object) -> float:
    return float(zlib.crc32(repr(names).encode()))


def _keyed(waits: Iterable[Span]) -> dict[Key, Arrival]:
    """The arrivals of these waits, each under a name that is the same on every rank."""
    new = {span.arrival.serial: span.arrival for span in waits if span.arrival is not None}
    keyed: dict[Key, Arrival] = {}
    counts: dict[tuple[int, str], int] = {}
    for _, arrival in sorted(new.items()):
        name = (arrival.step, arrival.name)
        counts[name] = counts.get(name, 0) + 1
        keyed[(*name, counts[name])] = arrival
    return keyed
