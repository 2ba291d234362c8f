"""The accounts of a run: at log steps the ranks compare arrival times, and every held step line gets its bubbles.

A rank alone cannot tell whether it waits for a transfer or for another rank. So a step's line is held until the next
log step, where one small maximum over the ranks gives the last arrival at every exchange since the last one, and one
gather brings each rank's parts to rank 0: two small exchanges every `run.log_every` steps, on any number of ranks.
"""

from __future__ import annotations

import time
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm.world import Ranks, SharedClock
from freescale.trace import Parts, Recorder, Span, SpanWriter, exchange, is_kept, split_step, total

_SLOTS = 64
"""Exchanges a step that can be compared; a step of the plain schedule has five."""

_REMEASURE = 50
"""Accounts between two looks at the clocks of other machines."""

_NEVER = -float("inf")

_start_of = attrgetter("start")

Key = tuple[int, str, int]
"""An exchange: step, name, and which one of that name in that step."""


@dataclass(frozen=True)
class AccountedStep:
    """A step line and where its time went.

    Args:
        step: counted from 1.
        line: what the loop had to say about it.
        ranks: the parts of every rank; none where they are not recorded, or the run ended before they were compared.
        seconds: how long it took, by this rank's host.
    """

    step: int
    line: dict[str, object]
    ranks: tuple[Parts, ...] = ()
    seconds: float | None = None


@dataclass(kw_only=True)
class Accounts:
    """Holds step lines until their time is accounted for.

    Args:
        ranks: who takes part.
        recorder: this rank's spans; None writes every line at once, without bubbles.
        write: takes the accounted steps, in order; called on every rank, with the parts of all ranks on rank 0 only.
        every: steps between two accounts.
        clock: brings this rank's times to those of rank 0.
        spans: where the spans of kept steps go.
        totals: the parts of each rank (on rank 0; elsewhere its own) over all steps so far but the first, which
            compiles kernels and opens connections and says nothing about the others.
    """

    ranks: Ranks
    recorder: Recorder | None
    write: Callable[[AccountedStep], None]
    every: int = 20
    clock: SharedClock | None = None
    spans: SpanWriter | None = None
    totals: list[Parts] = field(default_factory=list)
    _known: dict[int, float] = field(default_factory=dict)
    _ended_at: float = 0.0
    _held: deque[AccountedStep] = field(default_factory=deque)
    _ended: deque[tuple[int, float, float]] = field(default_factory=deque)
    _spans: list[Span] = field(default_factory=list)
    _due_first: int = 0
    _num_accounts: int = 0
    _warm: bool = False

    @property
    def clock_error(self) -> float | None:
        """Seconds by which the clocks of the machines may be apart; None where all ranks share one."""
        return self.clock.largest_error if self.clock is not None and self.clock.num_machines > 1 else None

    def begin(self, step: int) -> None:
        """Training starts, or goes on after an evaluation or a checkpoint, with this step."""
        self._ended_at = time.monotonic()
        if self.recorder is not None and self.recorder.paused:
            self._due_first = step + self.recorder.clock.lag
            self.recorder.begin(step)

    def end_step(self) -> float:
        """The optimizer step is over; returns the seconds it took, by this rank's host."""
        began, self._ended_at = self._ended_at, time.monotonic()
        if self.recorder is not None:
            self.recorder.end_step()
        return self._ended_at - began

    def add(self, step: int, line: dict[str, object], *, seconds: float | None = None) -> None:
        """Hold the line of a step that took this long; where an account is due, write all that are complete."""
        self._held.append(AccountedStep(step, line, seconds=seconds))
        if self.recorder is None:
            self._write_held()
            return
        lag = self.recorder.clock.lag
        if self.ranks.control is None or (step - lag) % self.every == 0 or step == self._due_first:
            self._account(step)

    def pause(self) -> None:
        """Training stands still: account for everything up to here. Every rank must call it."""
        if self.recorder is None or self.recorder.paused:
            return
        self.recorder.clock.wait_for_marks()
        if self._held:
            self._account(self._held[-1].step)
        self.recorder.pause()
        self._spans.clear()

    def close(self) -> None:
        """Write what is held, without bubbles where the other ranks can no longer be asked."""
        if self.recorder is not None:
            self.recorder.pause()
        self._write_held()
        if self.spans is not None:
            self.spans.close()

    def _write_held(self) -> None:
        while self._held:
            self.write(self._held.popleft())

    def _account(self, up_to: int) -> None:
        assert self.recorder is not None
        self._ended.extend(self.recorder.ended_steps())
        taken = self.recorder.take()
        self._spans.extend(span if span.arrival is None else self._recalled(span) for span in taken)
        first = self._held[0].step
        # Later steps may have ended, too; their lines are still to come.
        done = min(up_to, self._ended[-1][0]) if self._ended else first - 1
        if self.ranks.control is not None:
            with exchange("compare notes"):
                done = self._compare(first, up_to, done)
            self._num_accounts += 1
            if self.clock is not None and self._num_accounts % _REMEASURE == 0:
                self.clock.measure(rounds=4)
        self._spans.sort(key=_start_of)
        mine = [self._close_step() for _ in range(done - first + 1)]
        if self.spans is not None:
            self.spans.flush()
        for parts in self._everybodys(mine):
            if self._warm:
                self.totals = [total(pair) for pair in zip(self.totals, parts)] if self.totals else parts
            self._warm = True
            self.write(replace(self._held.popleft(), ranks=tuple(parts)))

    def _close_step(self) -> Parts:
        """Split the oldest ended step and let go of the spans that lie behind it; spans are in order of their starts.

        An account closes many steps: each looks at its own spans, not at those of all that follow.
        """
        step, start, end = self._ended.popleft()
        num_begun = bisect_left(self._spans, end, key=_start_of)
        begun = self._spans[:num_begun]
        parts = split_step(start, end, begun)
        if self.spans is not None and is_kept(step):
            self.spans.write(step, start, end, parts, begun, offset=self._offset())
        self._spans[:num_begun] = [span for span in begun if span.end > end]
        return parts

    def _compare(self, first: int, up_to: int, done: int) -> int:
        """Fill in the last arrivals of all waits up to a step; returns the last step that every rank has behind it."""
        keyed = self._keyed(up_to)
        arrivals = {key: span.arrival.mark for key, _, span in keyed if span.arrival is not None}
        rows: dict[int, list[Key]] = {step: [] for step in range(first, up_to + 1)}
        for key in sorted(arrivals):
            rows[max(first, key[0])].append(key)
        offset = self._offset()
        lines = [_line_of(keys, [arrivals[key] + offset for key in keys[:_SLOTS]]) for keys in rows.values()]
        table = torch.tensor([*lines, [-done] + [_NEVER] * (_SLOTS + 1)], dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self.ranks.control)
        if bool((table[:-1, 0] == -table[:-1, 1]).all()):
            last = {
                key: value
                for row, keys in zip(table[:, 2:].tolist(), rows.values())
                for key, value in zip(keys, row)
            }
        else:
            last = self._by_name({key: value + offset for key, value in arrivals.items()})
        self._fill_in({key: value - offset for key, value in last.items()}, keyed)
        return int(-table[-1, 0])

    def _by_name(self, mine: dict[Key, float]) -> dict[Key, float]:
        """The same where ranks have seen different exchanges so far: larger, but it needs no common order."""
        everybody: list[dict[Key, float]] = [{} for _ in range(self.ranks.num_ranks)]
        dist.all_gather_object(everybody, mine, group=self.ranks.control)
        return {key: max(other.get(key, _NEVER) for other in everybody) for key in mine}

    def _fill_in(self, last: dict[Key, float], keyed: list[tuple[Key, int, Span]]) -> None:
        self._known = {
            span.arrival.serial: last[key] for key, _, span in keyed if span.arrival and key in last
        }
        for _, place, span in keyed:
            self._spans[place] = self._recalled(span)

    def _recalled(self, span: Span) -> Span:
        """A wait may be recorded after its exchange was compared: one that was started early, say."""
        if span.arrival is None or span.last is not None:
            return span
        last = self._known.get(span.arrival.serial)
        return span if last is None else span._replace(last=last)

    def _keyed(self, up_to: int) -> list[tuple[Key, int, Span]]:
        """Waits of steps up to here not compared yet: a name that is the same on every rank, place, span."""
        waits = sorted(
            (span.arrival.serial, place)
            for place, span in enumerate(self._spans)
            if span.arrival is not None and span.last is None and span.arrival.step <= up_to
        )
        keyed: list[tuple[Key, int, Span]] = []
        counts: dict[tuple[int, str], int] = {}
        before = -1
        for serial, place in waits:
            span = self._spans[place]
            assert span.arrival is not None
            name = (span.arrival.step, span.arrival.name)
            if serial != before:
                counts[name] = counts.get(name, 0) + 1
            before = serial
            keyed.append(((*name, counts[name]), place, span))
        return keyed

    def _everybodys(self, mine: Sequence[Parts]) -> list[list[Parts]]:
        """[steps][ranks] on rank 0, this rank's alone elsewhere."""
        if self.ranks.control is None or not mine:
            return [[parts] for parts in mine]
        numbers = torch.tensor(
            [(one.total, one.compute, one.straggler, one.comm) for one in mine], dtype=torch.float64
        )
        gathered: list[Tensor] | None = None
        if self.ranks.is_first:
            gathered = [torch.empty_like(numbers) for _ in range(self.ranks.num_ranks)]
        with exchange("compare notes"):
            dist.gather(numbers, gathered, dst=0, group=self.ranks.control)
        if gathered is None:
            return [[parts] for parts in mine]
        return [[Parts(*row) for row in rows] for rows in torch.stack(gathered, dim=1).tolist()]

    def _offset(self) -> float:
        return 0.0 if self.clock is None else self.clock.offset


def _line_of(keys: list[Key], arrivals: list[float]) -> list[float]:
    """A row of the table that ranks compare: a check of the names, so that its maximum tells whether all are alike."""
    check = zlib.crc32(repr(keys).encode())
    return [check, -check, *arrivals, *[_NEVER] * (_SLOTS - len(arrivals))]
