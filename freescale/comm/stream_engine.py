"""Rounds carried out by two CUDA streams of a rank: one for what leaves, one for what comes. No kernel, no thread.

    caller's stream   ──●──────────────────────────────────────────●── uses the rows
                        └> leaving: wait, copy, flag, wait, copy ──┤
                        └> coming:  wait, copy, flag, wait, ... ───┘     ● events, no wait of the CPU

Each round is one call for its flags (those of the round before are written by it, too) and one for each copy. What
leaves is queued one round ahead of what comes, so that the first chunk comes in while the second goes out, and so that
no wait stands before the flag that another rank's same wait needs: where both streams share a hardware queue, which
carries out one thing after the other, ranks would wait for each other for ever.

A stream that waits for a flag waits for ever. So a thread looks, a few times a second, whether what is under way still
moves. When a rank that is waited for has ended or the time is over, it writes the awaited flags itself: the streams run
free, whatever blocks the CPU returns, and the next call of the transport raises the error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from freescale.comm.cuda_driver import Copy, Driver, Word
from freescale.comm.looking_after import look_after
from freescale.comm.processes import Processes
from freescale.comm.rings import Exchange, FlagValue, Rings, Round, reached

_LOOK_S = 0.1


class Windows(Protocol):
    """Slots and flags, with the addresses this rank's GPU uses for them.

    Args:
        rings: what they are.
        slots: where each begins.
        flags: where each is.
    """

    rings: Rings
    slots: list[int]
    flags: list[int]

    def read(self, flags: Sequence[int]) -> list[int]:
        """Values of flags this rank waits for, read by the CPU."""

    def write(self, flags: Sequence[FlagValue]) -> None:
        """Flags this rank waits for, written by the CPU."""

    def close(self) -> None:
        """Let go of the memory; nothing is under way."""


@dataclass
class _UnderWay:
    """An exchange whose streams may still be at work."""

    exchange: Exchange
    events: tuple[torch.cuda.Event, torch.cuda.Event]
    began: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        return all(event.query() for event in self.events)

    def waits(self) -> dict[int, int]:
        """The last value each flag is waited for to have."""
        rounds = (*self.exchange.outgoing, *self.exchange.incoming)
        return {flag: value for each in rounds for flag, value in each.waits}


class _Pending:
    def __init__(self, engine: StreamEngine, received: Tensor, events: Sequence[torch.cuda.Event]) -> None:
        self._engine, self._received, self._events = engine, received, events

    def wait(self) -> Tensor:
        """Let the current stream wait until everything has left and arrived."""
        self._engine.check()
        stream = torch.cuda.current_stream(self._received.device)
        for event in self._events:
            stream.wait_event(event)
        self._received.record_stream(stream)
        return self._received


class StreamEngine:
    """Engine of GPU ranks.

    Args:
        windows_of: opens slots and flags; every rank calls it with the same rings.
        driver: queues copies and flags.
        device: the GPU.
        processes: of the other ranks.
        timeout_s: how long an exchange may stand still.
        engine: what moves the bytes.
        sm_free: whether no kernel runs for it.
        reason: why, or why not.
        stages_own: whether rows that stay here go through slots, too; a copy inside a GPU is a kernel.
    """

    queued = True

    def __init__(
        self,
        windows_of: WindowsOf,
        *,
        driver: Driver,
        device: torch.device,
        rank: int,
        processes: Processes,
        timeout_s: float,
        engine: str,
        sm_free: bool,
        reason: str,
        stages_own: bool,
    ) -> None:
        self.engine, self.sm_free, self.reason, self.stages_own = engine, sm_free, reason, stages_own
        self._windows_of, self._driver, self._device = windows_of, driver, device
        self._rank, self._processes, self._timeout_s = rank, processes, timeout_s
        self._windows: Windows | None = None
        # torch has 32 streams a priority and hands them out in turn: those of the priority that compute does not use
        # are not also somebody else's, whose work would then stand behind a wait for another rank.
        self._leaving, self._coming = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._under_way: deque[_UnderWay] = deque()
        self._failure: Exception | None = None

    def open(self, rings: Rings) -> None:
        """Make the slots and flags, in place of those before."""
        self._driver.use(index_of(self._device))
        before, self._windows = self._windows, None
        if before is not None:
            before.close()
        self._windows = self._windows_of(rings)
        if before is None:
            look_after(self, StreamEngine.look, every_s=_LOOK_S)

    def begin(
        self, exchange: Exchange, sent: Tensor, received: Tensor, *, own: tuple[int, int, int]
    ) -> _Pending:
        """Queue both sides of an exchange behind what the current stream has been given so far."""
        self.check()
        self._driver.use(index_of(self._device))
        now = torch.cuda.current_stream(self._device)
        for stream in (self._leaving, self._coming):
            stream.wait_stream(now)
        self._queue(exchange, sent.data_ptr(), received.data_ptr())
        source, target, size = own
        if size and not self.stages_own:
            copy = (received.data_ptr() + target, sent.data_ptr() + source, size)
            self._driver.copy([copy], self._coming.cuda_stream)
        events = (self._leaving.record_event(), self._coming.record_event())
        # Their memory is not given to anybody else before these streams have used it.
        for tensor in (sent, received):
            tensor.record_stream(self._leaving)
            tensor.record_stream(self._coming)
        self._under_way.append(_UnderWay(exchange, events))
        return _Pending(self, received, events)

    def drain(self) -> None:
        """Until all that was begun has left and arrived."""
        self._leaving.synchronize()
        self._coming.synchronize()
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong, if something has."""
        if self._failure is not None:
            raise self._failure

    def _queue(self, exchange: Exchange, sent: int, received: int) -> None:
        """Both sides, round by round in turn, what leaves one round ahead."""
        outgoing, incoming = exchange
        leaving, coming = self._leaving.cuda_stream, self._coming.cuda_stream
        before_out: list[FlagValue] = []
        before_in: list[FlagValue] = []
        for number in range(max(len(outgoing), len(incoming)) + 1):
            if number < len(outgoing):
                self._round(outgoing[number], before_out, leaving, sent, out=True)
                before_out = outgoing[number].signals
            if number == len(outgoing) - 1:
                self._driver.flags(leaving, write=self._words(before_out))
            if 0 < number <= len(incoming):
                self._round(incoming[number - 1], before_in, coming, received, out=False)
                before_in = incoming[number - 1].signals
        if before_in:
            self._driver.flags(coming, write=self._words(before_in))

    def _round(self, now: Round, before: list[FlagValue], stream: int, tensor: int, *, out: bool) -> None:
        """Write the flags of the round before and wait for those of this one, then copy."""
        assert self._windows is not None
        slots = self._windows.slots
        self._driver.flags(stream, write=self._words(before), wait=self._words(now.waits))
        copies: list[Copy]
        if out:
            copies = [(slots[slot], tensor + first, size) for slot, first, size in now.moves]
        else:
            copies = [(tensor + first, slots[slot], size) for slot, first, size in now.moves]
        self._driver.copy(copies, stream)

    def _words(self, flags: Sequence[FlagValue]) -> list[Word]:
        assert self._windows is not None
        places = self._windows.flags
        return [(places[flag], value) for flag, value in flags]

    # What the thread beside it does.

    def look(self) -> None:
        """Forget what is done; let streams run free that wait for a rank that will not come."""
        if self._failure is None:
            # Before anything is asked of CUDA: a caller who stands before a full queue may keep its lock.
            self._failure = self._find_ended()
        if self._failure is None:
            self._forget_done()
            self._failure = self._find_late()
        if self._failure is not None and self._under_way:
            self._let_go()

    def _forget_done(self) -> None:
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
            if self._under_way:
                self._under_way[0].began = max(self._under_way[0].began, time.monotonic())

    def _find_ended(self) -> Exception | None:
        ended = self._processes.ended()
        if not ended:
            return None
        late = {rank for each in list(self._under_way) for rank in self._late(each)}
        gone = sorted(late & set(ended))
        if not gone:
            return None
        return ConnectionError(f"ranks {gone} have ended while rows were to be exchanged with them")

    def _find_late(self) -> Exception | None:
        if not self._under_way or time.monotonic() - self._under_way[0].began <= self._timeout_s:
            return None
        late = self._late(self._under_way[0])
        if not late:
            return None
        return TimeoutError(f"ranks {late} did not exchange rows within {self._timeout_s:.0f} s")

    def _late(self, oldest: _UnderWay) -> list[int]:
        """Ranks that an exchange still waits for."""
        assert self._windows is not None
        waits = oldest.waits()
        values = dict(zip(waits, self._windows.read(list(waits))))
        late = {flag for flag, value in waits.items() if not reached(values[flag], value)}
        ranks = {rank for flag in late for rank in self._windows.rings.ranks_of(flag)}
        return sorted(ranks - {self._rank})

    def _let_go(self) -> None:
        """Write what the streams wait for. Nobody else waits for these flags; a living rank may write over them."""
        assert self._windows is not None
        last: dict[int, int] = {}
        for each in list(self._under_way):
            last.update(each.waits())
        self._windows.write(list(last.items()))


class WindowsOf(Protocol):
    """Opens slots and flags together with the other ranks."""

    def __call__(self, rings: Rings) -> Windows:
        """Every rank calls it with the same rings."""


def index_of(device: torch.device) -> int:
    """The number of a GPU; that of the current one where none is named."""
    return torch.cuda.current_device() if device.index is None else device.index
