"""Rings in shared memory, served by the CPU ranks themselves.

The thread that starts or waits for an exchange does the copies that are ready on both sides. When nothing is, it sleeps
in the kernel until another rank rings its bell. As with sockets, a thread moves exchanges that nobody waits for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from freescale.comm.rings.rounds import ExchangeRounds, Rings, Round, reached
from freescale.comm.rings.shared_memory import WORDS_A_FLAG, SharedMemory, share_memory
from freescale.comm.world import Processes, RanksEndedError, poll_in_background
from freescale.kernels import runtime

# Exchanges that nobody waits for are polled this often; most leave at once.
_NUDGE_S = 0.02
# A rank that sleeps looks this often whether those it waits for are still alive.
_LOOK_S = 0.1


class _Pending:
    """An exchange on its way."""

    def __init__(self, engine: SharedRings, received: Tensor, num_rounds: int) -> None:
        self._engine, self._received = engine, received
        self.num_left = num_rounds

    def wait(self) -> Tensor:
        """Move bytes until everything has left and arrived."""
        self._engine.finish(self)
        return self._received


@dataclass
class _Job:
    """A round that waits for its turn."""

    round: Round
    bytes: NDArray[np.uint8]
    sends: bool
    pending: _Pending


class SharedRings:
    """Engine of CPU ranks on one machine.

    Args:
        control: a group for opening the memory together.
        processes: of the other ranks.
        timeout_s: how long to wait for another rank.
    """

    engine = "shared memory"
    sm_free = True
    reason = "the CPU moves the bytes, through memory all ranks map"
    queued = False

    def __init__(self, control: dist.ProcessGroup, *, processes: Processes, timeout_s: float) -> None:
        self._control, self._processes, self._timeout_s = control, processes, timeout_s
        self._rank = dist.get_rank(control)
        self._lock = threading.Lock()
        self._sides: tuple[deque[_Job], deque[_Job]] = (deque(), deque())
        self._num_waiting = 0
        self._memory: SharedMemory | None = None

    def open(self, rings: Rings) -> None:
        """Make the slots and flags, in place of those before."""
        first = self._memory is None
        self._rings, self._memory = rings, share_memory(self._control, rings, timeout_s=self._timeout_s)
        if first:
            poll_in_background(self, SharedRings.poll, every_s=_NUDGE_S)

    def begin(
        self, exchange: ExchangeRounds, sent: Tensor, received: Tensor, *, own: tuple[int, int, int]
    ) -> _Pending:
        """Start both sides, and do what can be done at once."""
        leaving, coming = _bytes_of(sent), _bytes_of(received)
        source, target, size = own
        coming[target : target + size] = leaving[source : source + size]
        pending = _Pending(self, received, len(exchange.outgoing) + len(exchange.incoming))
        with self._lock:
            outgoing, incoming = self._sides
            outgoing.extend(_Job(each, leaving, True, pending) for each in exchange.outgoing)
            incoming.extend(_Job(each, coming, False, pending) for each in exchange.incoming)
            self._move()
        return pending

    def drain(self) -> None:
        """Until all that was begun has left and arrived."""
        with self._lock:  # the thread beside it may do the last round between two looks
            last = [side[-1].pending for side in self._sides if side]
        for pending in last:
            self.finish(pending)

    def check(self) -> None:
        """Whoever waits hears at once what has gone wrong."""

    def finish(self, pending: _Pending) -> None:
        """Move bytes until an exchange is complete."""
        if not pending.num_left:
            return
        deadline = time.monotonic() + self._timeout_s
        self._num_waiting += 1
        try:
            with self._lock:
                self._finish(pending, deadline)
        finally:
            self._num_waiting -= 1

    def _finish(self, pending: _Pending, deadline: float) -> None:
        assert self._memory is not None
        bell, moved_until = self._rings.bell(self._rank), deadline
        while True:
            # The bell before the flags: what changes after the look at them has rung it, and the sleep ends at once.
            rung = runtime.load_flag(self._memory.words, WORDS_A_FLAG * bell)
            if self._move():
                moved_until = time.monotonic() + self._timeout_s
            if not pending.num_left:
                return
            left = moved_until - time.monotonic()
            self._check(left)
            self._memory.sleep_on(bell, rung, min(left, _LOOK_S))

    def _check(self, seconds_left: float) -> None:
        """Raise when a rank that is waited for has ended, or the time is over."""
        ended = self._processes.ended()
        if ended:
            self._move()  # it may have done its part before
        late = self.late()
        gone = [rank for rank in late if rank in ended]
        if gone:
            raise RanksEndedError.of(gone)
        if late and seconds_left <= 0:
            raise TimeoutError(f"ranks {late} did not exchange rows within {self._timeout_s:.0f} s")

    def late(self) -> list[int]:
        """Ranks that the next rounds of both sides wait for."""
        ranks: set[int] = set()
        for side in self._sides:
            for flag, value in side[0].round.waits if side else ():
                if not self._reached(flag, value):
                    ranks.update(self._rings.ranks_of(flag))
        return sorted(ranks - {self._rank})

    def _move(self) -> bool:
        """Do the rounds that are ready; whether there were any."""
        moved, to_wake = False, set[int]()
        for side in self._sides:
            while side and all(self._reached(flag, value) for flag, value in side[0].round.waits):
                job = side.popleft()
                self._copy(job)
                to_wake |= self._signal(job.round)
                job.pending.num_left -= 1
                moved = True
        assert self._memory is not None
        for rank in sorted(to_wake):
            runtime.add_one_to_flag(self._memory.words, WORDS_A_FLAG * self._rings.bell(rank))
            self._memory.wake(self._rings.bell(rank))
        return moved

    def _copy(self, job: _Job) -> None:
        assert self._memory is not None
        for slot, first, size in job.round.moves:
            start = self._rings.slot_offset(slot)
            shared, own = self._memory.bytes[start : start + size], job.bytes[first : first + size]
            np.copyto(*((shared, own) if job.sends else (own, shared)))

    def _signal(self, done: Round) -> set[int]:
        """Write the flags of a round; the ranks that may be waiting for them."""
        assert self._memory is not None
        ranks = set[int]()
        for flag, value in done.signals:
            runtime.store_flag(self._memory.words, WORDS_A_FLAG * flag, value)
            ranks.update(self._rings.ranks_of(flag))
        return ranks - {self._rank}

    def _reached(self, flag: int, value: int) -> bool:
        assert self._memory is not None
        return reached(runtime.load_flag(self._memory.words, WORDS_A_FLAG * flag), value)

    def poll(self) -> None:
        """Keep exchanges moving that nobody waits for."""
        if self._num_waiting == 0 and any(self._sides) and self._lock.acquire(blocking=False):
            try:
                self._move()
            finally:
                self._lock.release()


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.view(-1).view(torch.uint8).numpy()
