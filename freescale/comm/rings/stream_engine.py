"""Rounds carried out by two CUDA streams of a rank: one for what leaves, one for what comes. No thread.

    caller's stream   ──●──────────────────────────────────────────●── uses the rows
                        ├> leaving: wait, copy, flag, wait, copy ──┤
                        └> coming:  copy what stays, wait, copy, ──┘     ● events, no wait of the CPU
                                    flag, wait, ...

A copy of rows that stay is a kernel, as all copies inside a GPU are: it waits until a product leaves it an SM. First of
what comes, it does so while the first rows that travel are still on their way out. On the caller's stream it would hold
up compute; a third stream a channel would share a hardware queue with another, where eight ranks have 12 each.

Each round is one call for its flags (those of the round before are written by it, too) and one for its copies, which
a driver makes one by one or all together. What leaves is queued one round ahead of what comes, so that the first chunk
comes in while the second goes out, and so that no wait stands before the flag that another rank's same wait needs:
where streams share a hardware queue, which carries out one thing after the other, ranks would wait for each other for
ever.

A stream that waits for a flag waits for ever. So a thread looks, a few times a second, whether what is under way still
moves. When a rank that is waited for has ended or the time is over, it writes the awaited flags itself: the streams run
free, whatever blocks the CPU returns, and the next call of the transport raises the error.

That thread knows by the flags alone what is done. Who asks an event stands until the driver's lock is free, and that is
kept by a caller before a full queue: if the queue waits for a rank that is gone, both stand for ever. So flags lie in
memory of the host (pinned_flags.py), and callers are kept from filling these queues.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from freescale.comm.rings.cuda_driver import Driver, Word
from freescale.comm.rings.rounds import ExchangeRounds, FlagValue, Rings, Round, reached
from freescale.comm.world import Processes, RanksEndedError, poll_in_background

_LOOK_S = 0.1
_MOST_QUEUED = 512
"""Flags and copies that a stream is given ahead; CUDA's queues have room for about twice as many."""


class MappedRings(Protocol):
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
        """Let go of what is pinned; nothing is under way."""


@dataclass
class _UnderWay:
    """An exchange whose streams may still be at work."""

    exchange: ExchangeRounds
    began: float = field(default_factory=time.monotonic)

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
        open_rings: opens slots and flags; every rank calls it with the same rings.
        driver: queues flags, and copies out of tensors.
        device: the GPU.
        processes: of the other ranks.
        timeout_s: how long an exchange may stand still.
        engine: what moves the bytes.
        sm_free: as of `Transport`.
        reason: why, or why not.
        taking: queues copies into tensors, out of slots and of rows that stay; `driver`, unless it is given.
    """

    queued = True

    def __init__(
        self,
        open_rings: OpenRings,
        *,
        driver: Driver,
        device: torch.device,
        rank: int,
        processes: Processes,
        timeout_s: float,
        engine: str,
        sm_free: bool,
        reason: str,
        taking: Driver | None = None,
    ) -> None:
        self.engine, self.sm_free, self.reason = engine, sm_free, reason
        self._open_rings, self._driver, self._device = open_rings, driver, device
        self._taking = taking or driver
        self._rank, self._processes, self._timeout_s = rank, processes, timeout_s
        self._mapped: MappedRings | None = None
        # torch has 32 streams a priority and hands them out in turn: those of the priority that compute does not use
        # are not also somebody else's, whose work would then stand behind a wait for another rank.
        self._leaving, self._coming = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._under_way: deque[_UnderWay] = deque()
        self._ahead: deque[tuple[int, Sequence[torch.cuda.Event]]] = deque()
        self._num_queued = 0
        self._failure: Exception | None = None
        self._looking = threading.Lock()  # what is mapped stays while the thread reads them

    def open(self, rings: Rings) -> None:
        """Make the slots and flags, in place of those before."""
        self._driver.use(index_of(self._device))
        with self._looking:
            before, self._mapped = self._mapped, None
            self._under_way.clear()
        if before is not None:
            before.close()
        self._mapped = self._open_rings(rings)
        if before is None:
            poll_in_background(self, StreamEngine.look, every_s=_LOOK_S)

    def begin(
        self, exchange: ExchangeRounds, sent: Tensor, received: Tensor, *, own: tuple[int, int, int]
    ) -> _Pending:
        """Queue an exchange behind what the current stream has been given so far."""
        source, target, num_bytes = own
        outgoing, incoming = (sum(1 + len(each.moves) for each in side) for side in exchange)
        size = 1 + max(outgoing, incoming + (num_bytes > 0))
        self._make_room(size)
        self.check()
        self._driver.use(index_of(self._device))
        # Before the first call, in which the CPU may come to stand already.
        self._under_way.append(_UnderWay(exchange))
        now = torch.cuda.current_stream(self._device)
        for stream in (self._leaving, self._coming):
            stream.wait_stream(now)
        if num_bytes:
            copy = (received.data_ptr() + target, sent.data_ptr() + source, num_bytes)
            self._taking.copy([copy], self._coming.cuda_stream)
        self._queue(exchange, sent.data_ptr(), received.data_ptr())
        events = (self._leaving.record_event(), self._coming.record_event())
        # Their memory is not given to anybody else before these streams have used it.
        for tensor in (sent, received):
            tensor.record_stream(self._leaving)
            tensor.record_stream(self._coming)
        self._ahead.append((size, events))
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

    def _make_room(self, size: int) -> None:
        """Wait until the streams have done so much of what they were given that this fits, too."""
        self._num_queued += size
        while self._num_queued > _MOST_QUEUED and self._ahead:
            oldest, events = self._ahead.popleft()
            for event in events:
                event.synchronize()
            self._num_queued -= oldest

    def _queue(self, exchange: ExchangeRounds, sent: int, received: int) -> None:
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
        assert self._mapped is not None
        slots = self._mapped.slots
        self._driver.flags(stream, write=self._words(before), wait=self._words(now.waits))
        if out:
            self._driver.copy(
                [(slots[slot], tensor + first, size) for slot, first, size in now.moves], stream
            )
        else:
            self._taking.copy(
                [(tensor + first, slots[slot], size) for slot, first, size in now.moves], stream
            )

    def _words(self, flags: Sequence[FlagValue]) -> list[Word]:
        assert self._mapped is not None
        places = self._mapped.flags
        return [(places[flag], value) for flag, value in flags]

    # What the thread beside it does.

    def look(self) -> None:
        """Forget what is done; let streams run free that wait for a rank that will not come."""
        with self._looking:
            if self._mapped is None:
                return
            if self._failure is None:
                try:
                    self._failure = self._find_failure(self._mapped)
                except Exception as error:  # whoever exchanges next hears of it; this thread must go on
                    self._failure = error
            if self._failure is not None:
                self._let_go(self._mapped)

    def _find_failure(self, mapped: MappedRings) -> Exception | None:
        """A rank that rows are still to be exchanged with and that has ended, or is too late."""
        ended = self._processes.ended()  # before the flags: what a rank has written, it wrote before its end
        late = self._late(mapped)
        gone = sorted(set(ended) & {rank for ranks in late for rank in ranks})
        if gone:
            return RanksEndedError.of(gone)
        if late and time.monotonic() - self._under_way[0].began > self._timeout_s:
            return TimeoutError(
                f"ranks {late[0]} did not exchange rows within {self._timeout_s:.0f} s, or this rank's own GPU did not "
                "come to it"
            )
        return None

    def _late(self, mapped: MappedRings) -> list[list[int]]:
        """Ranks that each exchange under way waits for, the oldest first; those that wait for none are forgotten."""
        waits = [each.waits() for each in list(self._under_way)]
        flags = list({flag: None for each in waits for flag in each})
        values = dict(zip(flags, mapped.read(flags))) if flags else {}
        late = [self._ranks_behind(each, values, mapped.rings) for each in waits]
        while late and not late[0]:
            late.pop(0)
            self._under_way.popleft()
            if late:
                self._under_way[0].began = time.monotonic()
        return late

    def _ranks_behind(self, waits: dict[int, int], values: dict[int, int], rings: Rings) -> list[int]:
        behind = {flag for flag, value in waits.items() if not reached(values[flag], value)}
        return sorted({rank for flag in behind for rank in rings.ranks_of(flag)} - {self._rank})

    def _let_go(self, mapped: MappedRings) -> None:
        """Write what the streams wait for. Nobody else waits for these flags; a living rank may write over them."""
        last: dict[int, int] = {}
        for each in list(self._under_way):
            last.update(each.waits())
        if last:
            mapped.write(list(last.items()))


class OpenRings(Protocol):
    """Opens slots and flags together with the other ranks."""

    def __call__(self, rings: Rings) -> MappedRings:
        """Every rank calls it with the same rings."""


def index_of(device: torch.device) -> int:
    """The number of a GPU; that of the current one where none is named."""
    return torch.cuda.current_device() if device.index is None else device.index
