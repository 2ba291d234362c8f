"""What the ranks tell each other about their exchanges: who kept whom waiting, and when.

A rank alone cannot tell whether it waits for a transfer or for another rank. It waits for a rank

    until the last one is there      less the time a transfer had held that one, and not this one
    while another one stands still   stopped or without a core, also where it has long been there

and for the transfer at all other moments. The exception matters where the wire is slow: a rank that its last transfer
has held for 20 ms comes 20 ms late to the next exchange, and only the wire is to blame. A rank that stands still itself
waits for nothing.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from freescale.comm.world import Ranks, SharedClock
from freescale.trace import MAIN, Arrival, Interval, Span, held_before, overlap, union, without
from freescale.train.log.stalls import Stalls

_SLOTS = 64
"""Exchanges a step that can be compared; a step of the plain schedule has five."""

_NEVER = -float("inf")

Key = tuple[int, str, int]
"""An exchange: step, name, and which one of that name in that step."""

Numbers = tuple[float, ...]


class _Last(NamedTuple):
    """The last rank at an exchange: when it came, and when a transfer had held it before."""

    came: float
    held: tuple[Interval, ...]


@dataclass(kw_only=True)
class Notes:
    """Compares the exchanges of this rank with those of the others; every rank must do so at the same steps.

    Args:
        ranks: who takes part.
        clock: brings this rank's times to those of rank 0.
        stalls: when this process stood still; None is never.
    """

    ranks: Ranks
    clock: SharedClock | None = None
    stalls: Stalls | None = None
    _known: dict[int, _Last] = field(default_factory=dict)
    _left: dict[str, list[float]] = field(default_factory=dict)
    _own_stalls: list[Interval] = field(default_factory=list)
    _other_stalls: list[Interval] = field(default_factory=list)

    @property
    def offset(self) -> float:
        """What to add to this rank's clock."""
        return 0.0 if self.clock is None else self.clock.offset

    def compare(self, spans: list[Span], *, first: int, up_to: int, done: int) -> int:
        """Fill in whom the waits of steps up to one were for; returns the last step that every rank has behind it.

        Args:
            spans: all of this rank that lie in steps not closed yet; changed.
            first: the oldest of these steps.
            up_to: the newest that is to be accounted for.
            done: the newest that this rank has behind it.
        """
        stalls = [] if self.stalls is None else self.stalls.take()
        self._own_stalls = union([*self._own_stalls, *stalls])
        spans[:] = [self._recalled(piece) for span in spans for piece in self._awake(span)]
        arrivals = _arrivals(spans, up_to)
        table = _Table(self.ranks, arrivals, steps=range(first, up_to + 1))
        mine = {key: (arrival.mark + self.offset,) for key, arrival in arrivals.items()}
        came, (behind, stalled) = table.maxima(mine, extra=(-done, float(len(stalls))))
        last = {arrivals[key].serial: at - self.offset for key, (at,) in came.items()}
        # Only the rank that came last has something to say of its lateness.
        late = {arrivals[key].serial: key for key, at in came.items() if at == mine[key]}
        held = held_before(spans, last, late=late)
        told = {late[serial]: (at[0] + self.offset, at[1] + self.offset) for serial, at in held.items()}
        holds, _ = table.maxima(told, width=2)
        if stalled:
            self._hear_of_stalls(stalls)
        self._known = {
            arrivals[key].serial: _Last(at - self.offset, self._interval(holds.get(key)))
            for key, (at,) in came.items()
        }
        self._left = _left_behind(spans)
        spans[:] = map(self._recalled, spans)
        self._forget_stalls_before(min((span.start for span in spans), default=0.0))
        return int(-behind)

    def _interval(self, told: Numbers | None) -> tuple[Interval, ...]:
        if told is None or told[0] == _NEVER:
            return ()
        return ((told[0] - self.offset, told[1] - self.offset),)

    def _recalled(self, span: Span) -> Span:
        """A wait may be recorded after its exchange was compared: one that was started early, say."""
        last = None if span.arrival is None else self._known.get(span.arrival.serial)
        if last is None or span.missing is not None:
            return span
        late: list[Interval] = []
        due = last.came - self._excused(span, last)
        if due > span.start:
            late = [(span.start, min(span.end, due))]
        if self._other_stalls:
            late = union([*late, *overlap([(span.start, span.end)], self._other_stalls)])
        return Span(*span[:7], last=last.came, missing=tuple(late))  # a tenth of what `_replace` takes

    def _excused(self, span: Span, last: _Last) -> float:
        """By how much earlier the last rank had come, if no transfer had held it for longer than this one.

        Once this rank has left its own exchanges behind and computes, every moment that the other is held counts.
        """
        if not last.held or span.arrival is None:
            return 0.0
        ((low, high),) = last.held
        lanes = (self._left.get(lane, []) for lane in {span.lane, MAIN})
        ends = (left[place - 1] for left in lanes if (place := bisect_right(left, span.arrival.mark)))
        return max(0.0, high - max(low, *ends, _NEVER))

    def _awake(self, span: Span) -> Iterable[Span]:
        """The pieces of a wait in which this rank did not stand still itself."""
        if span.kind != "wait" or not self._own_stalls:
            return [span]
        pieces = without([(span.start, span.end)], self._own_stalls)
        return [span._replace(start=low, end=high) for low, high in pieces]

    def _hear_of_stalls(self, mine: Sequence[Interval]) -> None:
        everybody: list[list[Interval]] = [[] for _ in range(self.ranks.num_ranks)]
        told = [(low + self.offset, high + self.offset) for low, high in mine]
        dist.all_gather_object(everybody, told, group=self.ranks.control)
        others = (stalls for rank, stalls in enumerate(everybody) if rank != self.ranks.rank)
        heard = [(low - self.offset, high - self.offset) for stalls in others for low, high in stalls]
        self._other_stalls = union([*self._other_stalls, *heard])

    def _forget_stalls_before(self, moment: float) -> None:
        self._own_stalls = [stall for stall in self._own_stalls if stall[1] > moment]
        self._other_stalls = [stall for stall in self._other_stalls if stall[1] > moment]


def _left_behind(spans: Iterable[Span]) -> dict[str, list[float]]:
    """Thread -> when each of its waits ended, in order."""
    ends: dict[str, list[float]] = {}
    for span in spans:
        if span.kind == "wait":
            ends.setdefault(span.lane, []).append(span.end)
    return {lane: sorted(moments) for lane, moments in ends.items()}


class _Table:
    """The exchanges of some steps: a line a step, as long on every rank.

    Args:
        ranks: who takes part.
        keys: the exchanges of this rank.
        steps: those of the lines; what belongs to earlier ones stands in the first.
    """

    def __init__(self, ranks: Ranks, keys: Iterable[Key], *, steps: range) -> None:
        self._ranks = ranks
        lines: dict[int, list[Key]] = {step: [] for step in steps}
        for key in sorted(keys):
            lines[max(steps.start, key[0])].append(key)
        self._lines = [keys[:_SLOTS] for keys in lines.values()]
        self._checks = [float(zlib.crc32(repr(keys).encode())) for keys in self._lines]

    def maxima(
        self, mine: Mapping[Key, Numbers], *, width: int = 1, extra: Numbers = ()
    ) -> tuple[dict[Key, Numbers], list[float]]:
        """The largest of all ranks' numbers, one by one: for each exchange of this rank, and for the extra ones.

        One size for all, and small, where every rank has seen the same exchanges; by name where not.

        Args:
            mine: `width` numbers of this rank for exchanges that it has something to say of.
            width: how many.
            extra: further numbers, as many on every rank.
        """
        never = (_NEVER,) * width
        padded = [[*line, *[None] * (_SLOTS - len(line))] for line in self._lines]
        numbers = [mine.get(key, never) if key else never for line in padded for key in line]
        checks = [number for check in self._checks for number in (check, -check)]
        table = torch.tensor([*extra, *checks, *(n for each in numbers for n in each)], dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self._ranks.control)
        further, checked, largest = table.split([len(extra), len(checks), width * len(numbers)])
        if bool((checked[::2] != -checked[1::2]).any()):
            return self._by_name(mine, never), further.tolist()
        slots = largest.view(-1, width).tolist()
        keys = (key for line in padded for key in line)
        return {key: tuple(slot) for key, slot in zip(keys, slots) if key}, further.tolist()

    def _by_name(self, mine: Mapping[Key, Numbers], never: Numbers) -> dict[Key, Numbers]:
        everybody: list[Mapping[Key, Numbers]] = [{} for _ in range(self._ranks.num_ranks)]
        dist.all_gather_object(everybody, dict(mine), group=self._ranks.control)
        keys = (key for line in self._lines for key in line)
        return {key: tuple(map(max, *(other.get(key, never) for other in everybody))) for key in keys}


def _arrivals(spans: Iterable[Span], up_to: int) -> dict[Key, Arrival]:
    """Arrivals of steps up to one that were not compared yet, each under a name that is the same on every rank."""
    new = {
        span.arrival.serial: span.arrival
        for span in spans
        if span.arrival is not None and span.missing is None and span.arrival.step <= up_to
    }
    keyed: dict[Key, Arrival] = {}
    counts: dict[tuple[int, str], int] = {}
    for _, arrival in sorted(new.items()):
        name = (arrival.step, arrival.name)
        counts[name] = counts.get(name, 0) + 1
        keyed[(*name, counts[name])] = arrival
    return keyed
