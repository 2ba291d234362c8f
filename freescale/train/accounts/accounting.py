"""The accounts of a run: at log steps the ranks compare arrival times, and every held step line gets its bubbles.

A rank alone cannot tell whether it waits for a transfer or for another rank. So a step's line is held until the next
log step, where two small maxima over the ranks say of every exchange since the last one when the last rank came and why
so late (`notes.py`), and one gather brings each rank's parts to rank 0: three small exchanges every `run.log_every`
steps, on any number of ranks, and one more where some rank has stood still.

What is worked out between them takes a millisecond a step. On GPUs a process beside each rank does it (`beside.py`),
the exchanges are begun and ended some steps apart, and nobody waits for either.

On a GPU the lines of the first steps are held until a few have been seen kernel by kernel (`busy_meter.py`): only then
it is known how much of a stretch of work was work.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from freescale.comm.world import Ranks, SharedClock
from freescale.trace import Parts, Recorder, Span, SpanWriter, total
from freescale.train.accounts.account_talk import begin_ask, begin_to_tell
from freescale.train.accounts.account_words import AccountWords, host_advice, watch_story
from freescale.train.accounts.accountant import ClosedStep, Due, KeptStepParts
from freescale.train.accounts.beside import Beside, Bookkeeper, Here
from freescale.train.accounts.busy_meter import BusyMeter
from freescale.train.accounts.closed_parts import ClosedParts, split_step
from freescale.train.accounts.driver_counter import DriverCounter
from freescale.train.accounts.notes import Ask
from freescale.train.accounts.stalls import Stalls

_REMEASURE = 50
"""Accounts between two looks at the clocks of other machines."""

_ALONE_S = 0.1
"""A rank alone accounts for all steps of so many seconds at once: one by one they take longer."""

_MOVES = 16
"""An account beside the steps takes six moves, asking twice and telling rank 0, or eight where a rank stood still: with
so many between two of them, it is over before half of the steps to the next."""


class AccountedStep(NamedTuple):
    """A step line and where its time went.

    Args:
        step: counted from 1.
        line: what the loop had to say about it.
        ranks: the parts of every rank; none where they are not recorded, or the run ended before they were compared.
        seconds: how long it took, by this rank's host.
        dry: share of the moments of a step, over the ranks, at which a device had nothing left to run; None on CPUs.
        unknown: ranks whose devices' busy time is not known: their gaps between kernels are counted as compute.
        watched: it was seen kernel by kernel, which makes a step slower.
    """

    step: int
    line: dict[str, object]
    ranks: tuple[Parts, ...] = ()
    seconds: float | None = None
    dry: float | None = None
    unknown: tuple[int, ...] = ()
    watched: bool = False


class _Passed(NamedTuple):
    """Spans, and (step, start, end) of steps, that lie behind the device."""

    spans: list[Span]
    steps: list[tuple[int, float, float]]


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
        busy: how long the device works in its stretches; None: all of the time, as on a CPU.
        driver: what the driver says of the device, to be held against the accounts.
        say: told once what whoever started the run should know.
        spans: where the spans of kept steps go; set before training begins.
        beside: accounts of several ranks are worked out by a process of their own, some steps later.
        totals: the parts of each rank (on rank 0; elsewhere its own) over all steps so far but the first, which
            compiles kernels and opens connections and says nothing about the others, and those that were watched.
        cpu_s: CPU seconds of the training thread that all accounts so far took.
    """

    ranks: Ranks
    recorder: Recorder | None
    write: Callable[[AccountedStep], None]
    every: int = 20
    clock: SharedClock | None = None
    stalls: Stalls | None = None
    busy: BusyMeter | None = None
    driver: DriverCounter | None = None
    say: Callable[[str], None] = lambda text: None
    spans: SpanWriter | None = None
    beside: bool = False
    totals: list[Parts] = field(default_factory=list)
    cpu_s: float = 0.0
    _began_at: float = math.inf
    _ended_at: float = 0.0
    _held: deque[AccountedStep] = field(default_factory=deque)
    _new: _Passed = field(default_factory=lambda: _Passed([], []))
    _watched: _Passed = field(default_factory=lambda: _Passed([], []))
    _due_first: int = 0
    _under_way: int | None = None
    _next_move: Callable[[], None] | None = None
    _num_accounts: int = 0
    _accounted_at: float = -math.inf
    _warm: bool = False

    @cached_property
    def _words(self) -> AccountWords:
        return AccountWords(self.say)

    @cached_property
    def _books(self) -> Bookkeeper:
        if self.beside:
            assert self.ranks.control is not None, "a rank alone accounts for its steps by itself"
            try:
                return Beside(rank=self.ranks.rank, spans=self.spans, timeout_s=self.ranks.timeout_s)
            except OSError as error:
                self.say(
                    f"no process can be started to account for steps beside them ({error}): they wait for it"
                )
        return Here(rank=self.ranks.rank, alone=self.ranks.control is None, spans=self.spans)

    @property
    def advice(self) -> str:
        """One sentence for whoever started the run, where its devices wait for their hosts; empty elsewhere."""
        return host_advice(self.totals, device=self.ranks.device.type)

    @property
    def watch_story(self) -> str | None:
        """What it took to see the device work, where that is worth a word."""
        took_s = 0.0 if self.busy is None else self.busy.took_s
        return watch_story(took_s, time.monotonic() - self._began_at)

    @property
    def clock_error(self) -> float | None:
        """Seconds by which the clocks of the machines may be apart; None where all ranks share one."""
        return self.clock.largest_error if self.clock is not None and self.clock.num_machines > 1 else None

    def begin(self, step: int, *, last_step: float = math.inf) -> None:
        """Training starts, or goes on after an evaluation or a checkpoint, with this step; the last of the run."""
        self._ended_at = time.monotonic()
        self._began_at = min(self._began_at, self._ended_at)
        if self.recorder is not None and self.recorder.paused:
            self._due_first = step + self.recorder.clock.lag
            self._books.begin()
            if self.driver is not None:
                self.driver.begin()
            if self.busy is not None:
                self.busy.last_step = last_step
                self.busy.begin(step)
            self.recorder.begin(step)

    def end_step(self) -> float:
        """The optimizer step is over; returns the seconds it took, by this rank's host."""
        began, self._ended_at = self._ended_at, time.monotonic()
        seconds = self._ended_at - began
        if self.recorder is not None:
            self.recorder.end_step()
            if self.busy is not None:
                self._watch(self.busy, self.recorder)
        return seconds

    def add(self, step: int, line: dict[str, object], *, seconds: float | None = None) -> None:
        """Hold the line of a step that took this long; where an account is due, write all that are complete."""
        self._held.append(AccountedStep(step, line, seconds=seconds))
        if self.recorder is None:
            self._write_held()
            return
        if self._under_way is not None and self._may_move(step - self._under_way):
            self._on_the_clock(self._move)
        if self.busy is not None and self.busy.holds(step):
            self._due_first = self.busy.known_after
            return
        if self._is_due(step):
            self._on_the_clock(lambda: self._account(step))

    def _is_due(self, step: int) -> bool:
        """Whether an account is due: on several ranks at the same steps, so nothing but their numbers decides it."""
        assert self.recorder is not None
        if self.ranks.control is None:
            return len(self._held) >= self.every or time.monotonic() - self._accounted_at >= _ALONE_S
        return (step - self.recorder.clock.lag) % self.every == 0 or step == self._due_first

    def pause(self) -> None:
        """Training stands still: account for everything up to here. Every rank must call it."""
        if self.recorder is None or self.recorder.paused:
            return
        self.recorder.clock.wait_for_marks()
        if self.busy is not None and self.busy.is_open:
            self._close_watch(self.busy, self.recorder)
        self._finish()
        if self._held:
            self._on_the_clock(lambda: self._account(self._held[-1].step))
            self._finish()
        if self.driver is not None and self.totals:
            self.driver.compare(compute=self.totals[0].share("compute"), host=self.totals[0].share("host"))
        self.recorder.pause()

    def close(self) -> None:
        """Write what is held, without bubbles where the other ranks can no longer be asked."""
        if self.recorder is not None and not self.recorder.paused:
            if self._held and self.ranks.control is None:
                # A run that dies: alone it can still tell of all that has passed. What it dies of is told elsewhere.
                with suppress(Exception):
                    self._account(self._held[-1].step)
            self.recorder.pause()
        if self.busy is not None:
            self.busy.abandon()
        self._write_held()
        if "_books" in self.__dict__:
            self._books.close()
        if self.spans is not None:
            self.spans.close()

    def _write_held(self) -> None:
        while self._held:
            self.write(self._held.popleft())

    def _watch(self, busy: BusyMeter, recorder: Recorder) -> None:
        """Open or close the watch between two steps; the time this takes belongs to none."""
        step = recorder.step - 1
        if busy.opens_after(step):
            busy.open()
        elif busy.closes_after(step):
            recorder.clock.wait_for_marks()
            self._close_watch(busy, recorder)
        else:
            return
        self._words.tell_stale(busy.times.stale)
        if self.driver is not None:
            self.driver.begin()
        recorder.begin(step + 1)
        self._ended_at = time.monotonic()

    def _close_watch(self, busy: BusyMeter, recorder: Recorder) -> None:
        self._collect(recorder)
        notes = [recorder.notes_of(step) for step, _, _ in self._watched.steps]
        busy.close(recorder.step - 1, self._watched.steps, self._watched.spans, notes)
        self._watched = _Passed([], [])

    def _collect(self, recorder: Recorder) -> None:
        """Take over what has passed on the device."""
        steps = recorder.ended_steps()  # first: so no span of theirs is still on its way
        passed = _Passed(recorder.take(), steps)
        watched = self.busy is not None and self.busy.is_open
        for into in (self._new, *([self._watched] if watched else [])):
            into.spans.extend(passed.spans)
            into.steps.extend(passed.steps)

    def _on_the_clock(self, act: Callable[[], None]) -> None:
        began = time.thread_time()
        try:
            act()
        finally:
            self.cpu_s += time.thread_time() - began

    def _account(self, up_to: int) -> None:
        """Begin an account of all steps so far; here it is over at once, beside the steps some of them later."""
        assert self.recorder is not None
        self._finish()
        self._accounted_at = time.monotonic()
        self._collect(self.recorder)
        if self.ranks.control is not None:
            self._num_accounts += 1
            if self.clock is not None and self._num_accounts % _REMEASURE == 0:
                self.clock.measure(rounds=4)
        due = Due(
            self._held[0].step,
            up_to,
            offset=0.0 if self.clock is None else self.clock.offset,
            stalls=() if self.stalls is None else self.stalls.take(),
        )
        (spans, steps), self._new = self._new, _Passed([], [])
        self._books.start(spans, steps, due)
        self._under_way, self._next_move = self._held[-1].step, self._hear
        if not self.beside:
            self._finish()

    def _finish(self) -> None:
        """Bring the account that is under way to its end."""
        while self._under_way is not None:
            self._move()

    def _may_move(self, num_steps: int) -> bool:
        """Whether an account of so many steps ago goes on: at the same steps on every rank."""
        return num_steps % max(1, self.every // _MOVES) == 0

    def _move(self) -> None:
        """One move of the account under way; what a move begins, the next one waits for."""
        assert self._next_move is not None
        self._next_move()

    def _hear(self) -> None:
        """Begin to ask the ranks what is asked next; or to tell rank 0 which steps were closed."""
        said = self._books.said()
        if isinstance(said, Ask):
            ended = begin_ask(said, self.ranks)

            def answer() -> None:
                self._books.answer(ended())
                self._next_move = self._hear

            self._next_move = answer
            return
        mine = self._closed(said)
        if self.driver is not None:
            self.driver.look()
        gathered = begin_to_tell(mine, self.ranks)

        def hand_on() -> None:
            for everybody in gathered():
                self._hand_on(self._held.popleft(), everybody)
            self._under_way = self._next_move = None

        self._next_move = hand_on

    def _closed(self, steps: Sequence[ClosedStep]) -> list[ClosedParts]:
        """Where the time of closed steps went, by what is known of this rank's device."""
        assert self.recorder is not None
        alone = self.ranks.num_ranks == 1
        found = [split_step(one, self.recorder, self.busy, is_alone=alone) for one in steps]
        self._books.keep(
            [
                KeptStepParts(one.step, closed.parts, self.recorder.take_cpu(one.step))
                for one, closed in zip(steps, found)
            ]
        )
        return found

    def _hand_on(self, held: AccountedStep, everybody: Sequence[ClosedParts]) -> None:
        """Write the line of a step, and add its time to the totals."""
        parts = [one.parts for one in everybody]
        watched = any(one.watched for one in everybody)
        if self._warm and not watched:
            self.totals = [total(pair) for pair in zip(self.totals, parts)] if self.totals else parts
        self._warm = True
        dry: float | None = None
        unknown: tuple[int, ...] = ()
        if self.busy is not None:
            dry = sum(one.dry for one in everybody) / len(everybody)
            unknown = tuple(rank for rank, one in enumerate(everybody) if not one.known)
            self._words.tell_unknown(unknown, self.busy.times.problem)
        self.write(AccountedStep(held.step, held.line, tuple(parts), held.seconds, dry, unknown, watched))
