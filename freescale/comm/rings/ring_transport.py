"""The all-to-all over rings of slots, written once: engines differ in what copies, writes flags and waits for them.

    CPU ranks of one machine    copies by the rank's own thread, flags in shared memory          cpu_engine.py
    host_staged                 pinned copies by copy engines, flags by stream memory operations  host_staged.py
    copy_engine                 copies into windows of other GPUs, flags beside them              copy_engine.py

Slots start small and grow with the messages. When to look at it is fixed (after 8, 64 and every 512 exchanges), so all
ranks come to it at the same exchange; what the largest message of any rank would like is then agreed by the group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm import Pending
from freescale.comm.rings.rounds import ExchangeRounds, Planner, Rings
from freescale.comm.world import Processes, RanksEndedError, naming_the_ended

_FIRST_LOOKS, _LOOK_EVERY = (8, 64), 512
_POLL_S = 0.0002
_LAST_WORDS_S = 0.5
"""What a rank sent before its end has arrived by then."""


class Engine(Protocol):
    """Carries out the rounds of exchanges, each side in order.

    Args:
        engine: what moves the bytes.
        sm_free: as of `Transport`.
        reason: why, or why not.
        queued: see `transport.only_queues`.
    """

    engine: str
    sm_free: bool
    reason: str
    queued: bool

    def open(self, rings: Rings) -> None:
        """Make the slots and flags, in place of those before; every rank must call it, with nothing under way."""

    def begin(
        self, exchange: ExchangeRounds, sent: Tensor, received: Tensor, *, own: tuple[int, int, int]
    ) -> Pending:
        """Start the two sides of an exchange.

        Args:
            exchange: the rounds.
            sent: contiguous rows; `Move` counts its bytes.
            received: room for the rows that come.
            own: first byte in `sent`, first byte in `received` and size of the rows that stay here, copied in place.
        """

    def drain(self) -> None:
        """Until all that was begun has left and arrived."""

    def check(self) -> None:
        """Raise what has gone wrong with an exchange that was begun before, if something has."""


class RingTransport:
    """Uneven all-to-all over an engine; every rank must start the same transfers in the same order.

    Args:
        name: what a recipe calls it.
        engine: moves the bytes.
        control: a CPU group of these ranks that nothing else uses.
        processes: of the other ranks.
        rings: size of the slots to begin with, and where epochs start.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        control: dist.ProcessGroup,
        processes: Processes,
        rings: Rings | None = None,
    ) -> None:
        self.name = name
        self.num_ranks, self.rank = dist.get_world_size(control), dist.get_rank(control)
        self.engine, self.sm_free, self.reason = engine.engine, engine.sm_free, engine.reason
        self.queued = engine.queued
        self._engine, self._control, self._processes = engine, control, processes
        self._num_started = 0
        self._wish = 0
        self._open(rings or Rings(self.num_ranks))

    @property
    def slot_bytes(self) -> int:
        """The largest chunk, as agreed."""
        return self._planner.rings.slot_bytes

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Begin to send; returns at once."""
        self._engine.check()  # before anything else: after a failure even counts are not to be trusted
        self._num_started += 1
        if self._num_started in _FIRST_LOOKS or self._num_started % _LOOK_EVERY == 0:
            with naming_the_ended(self._processes):
                self._grow()
        tensor = tensor.detach().contiguous()
        received = tensor.new_empty(sum(receive), *tensor.shape[1:])
        row_bytes = tensor.shape[1:].numel() * tensor.itemsize
        leaving, coming = [row_bytes * each for each in send], [row_bytes * each for each in receive]
        self._wish = max(self._wish, *leaving, *coming)
        own = (sum(leaving[: self.rank]), sum(coming[: self.rank]), leaving[self.rank])
        return self._engine.begin(self._planner.plan(send=leaving, receive=coming), tensor, received, own=own)

    def _grow(self) -> None:
        """Let the slots grow to what the largest message of any rank would like to be cut into.

        Only then is what is under way waited for: a GPU whose host has waited for it stands still afterwards.
        """
        wish = torch.tensor([self._wish])
        self._agree(dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=self._control, async_op=True))
        rings = self._planner.rings.grown(int(wish))
        if rings is not self._planner.rings:
            self._engine.drain()
            # Another rank may still have to write into this one's memory that it has read the last slots.
            self._agree(dist.barrier(group=self._control, async_op=True))
            self._open(rings)

    def _agree(self, work: dist.Work | None) -> None:
        """Wait for a collective call of the control group; ranks that have ended meanwhile are named."""
        assert work is not None
        since = None
        while not work.is_completed():
            ended = self._processes.ended()
            if ended and since is None:
                since = time.monotonic()
            if since is not None and time.monotonic() - since > _LAST_WORDS_S:
                raise RanksEndedError.of(ended)
            time.sleep(_POLL_S)
        work.wait()

    def _open(self, rings: Rings) -> None:
        self._engine.open(rings)
        self._planner = Planner(rings, rank=self.rank)
