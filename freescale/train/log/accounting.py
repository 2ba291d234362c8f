"""The accounts of a run: at log steps the ranks compare arrival times, and every held step line gets its bubbles.

A rank alone cannot tell whether it waits for a transfer or for another rank. So a step's line is held until the next
log step, where two small maxima over the ranks say of every exchange since the last one when the last rank came and why
so late (`notes.py`), and one gather brings each rank's parts to rank 0: three small exchanges every `run.log_every`
steps, on any number of ranks, and one more where some rank has stood still.
"""

from __future__ import annotations

import time
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
from freescale.train.log.notes import Notes
from freescale.train.log.stalls import Stalls

_REMEASURE = 50
"""Accounts between two looks at the clocks of other machines."""

_start_of = attrgetter("start")


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
        stalls: when this process stood still; None is never.
        spans: where the spans of kept steps go.
        totals: the parts of each rank (on rank 0; elsewhere its own) over all steps so far but the first, which
            compiles kernels and opens connections and says nothing about the others.
    """

    ranks: Ranks
    recorder: Recorder | None
    write: Callable[[AccountedStep], None]
    every: int = 20
    clock: SharedClock | None = None
    stalls: Stalls | None = None
    spans: SpanWriter | None = None
    totals: list[Parts] = field(default_factory=list)
    _ended_at: float = 0.0
    _held: deque[AccountedStep] = field(default_factory=deque)
    _ended: deque[tuple[int, float, float]] = field(default_factory=deque)
    _spans: list[Span] = field(default_factory=list)
    _due_first: int = 0
    _num_accounts: int = 0
    _warm: bool = False

    def __post_init__(self) -> None:
        self._notes = Notes(ranks=self.ranks, clock=self.clock, stalls=self.stalls)

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
        self._spans.extend(self.recorder.take())
        first = self._held[0].step
        # Later steps may have ended, too; their lines are still to come.
        done = min(up_to, self._ended[-1][0]) if self._ended else first - 1
        if self.ranks.control is not None:
            with exchange("compare notes"):
                done = self._notes.compare(self._spans, first=first, up_to=up_to, done=done)
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
            self.spans.write(step, start, end, parts, begun, offset=self._notes.offset)
        self._spans[:num_begun] = [span for span in begun if span.end > end]
        return parts

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
