"""All-to-all by one-sided puts: every rank writes its rows into the others' windows and they count its signals.

A put always signals its target, and a wait takes one signal of one source; signals carry no number and there are none
to say "I have read it". So that is said by the next put: a rank starts exchange e only after it has taken the rows of
exchange e - 2 out of its window. Whoever has the signal of e - 2 of a rank therefore knows that it has read e - 4, and
four slots in turn are never written too early. Every rank puts to every other in every exchange, rows or none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm import Pending

IN_FLIGHT = 2
SLOTS = 2 * IN_FLIGHT
_FIRST_BYTES = 64 << 10


class Window(Protocol):
    """Memory that every rank can write into, one of the same size on each.

    Args:
        memory: this rank's, as bytes.
    """

    memory: Tensor

    def put(self, first_byte: int, num_bytes: int, *, target: int, target_byte: int) -> None:
        """Copy bytes of this window into another rank's, and signal it; ordered with the current stream."""

    def wait_signal(self, source: int) -> None:
        """Let the current stream wait for one signal of a rank, and take it."""


OpenWindow = Callable[[int, Sequence[int]], Window]
"""Number of bytes, and the places where rows will be put -> a window; a collective."""


class _PendingPuts:
    """Rows that come by puts, in one slot of the window.

    Every part is copied to its place among the rows by itself: joined afterwards, rows would be copied twice.
    """

    def __init__(
        self, transport: OneSidedTransport, slot: int, sizes: Sequence[int], rows: Tensor, shape: torch.Size
    ) -> None:
        self._transport, self.slot, self.sizes = transport, slot, sizes
        self._rows = rows.new_empty(shape)
        self._bytes = _as_bytes(self._rows)

    def place(self, source: int) -> Tensor:
        """Where the bytes of a rank belong."""
        first = sum(self.sizes[:source])
        return self._bytes[first : first + self.sizes[source]]

    def wait(self) -> Tensor:
        """Rows by source rank."""
        self._transport.finish(self)
        return self._rows


class OneSidedTransport:
    """Uneven all-to-all by puts; every rank must start the same transfers in the same order.

    Args:
        open_window: makes a window, with the other ranks.
        control: a CPU group of these ranks that nothing else uses.
        engine: what moves the bytes.
        reason: why this way was chosen. NCCL starts no kernel; rows are copied into and out of windows by kernels.
    """

    name = "experimental_nccl_zero_sm"
    sm_free = False

    def __init__(
        self, open_window: OpenWindow, *, control: dist.ProcessGroup, engine: str, reason: str
    ) -> None:
        self._open_window, self._control = open_window, control
        self.engine, self.reason = engine, reason
        self.num_ranks, self.rank = dist.get_world_size(control), dist.get_rank(control)
        self._capacity = 0
        self._window: Window | None = None
        self._number = 0
        self._flying: deque[_PendingPuts] = deque()

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Begin to send; all ranks agree on the longest message, so it waits for them on the CPU."""
        tensor = tensor.detach().contiguous()
        row_bytes = tensor.shape[1:].numel() * tensor.itemsize
        sizes = [count * row_bytes for count in send]
        self._make_room(max(sizes))
        while len(self._flying) >= IN_FLIGHT:
            self.finish(self._flying[0])
        slot = self._number % SLOTS
        self._number += 1
        shape = torch.Size((sum(receive), *tensor.shape[1:]))
        puts = _PendingPuts(self, slot, [count * row_bytes for count in receive], tensor, shape)
        self._put(tensor, sizes, slot)
        own = sum(sizes[: self.rank])
        puts.place(self.rank).copy_(_as_bytes(tensor)[own : own + sizes[self.rank]])
        self._flying.append(puts)
        return puts

    def finish(self, puts: _PendingPuts) -> None:
        """Take the rows of an exchange, and of all before it, out of the window."""
        while any(flying is puts for flying in self._flying):
            oldest = self._flying.popleft()
            for source in range(self.num_ranks):
                if source != self.rank:
                    self._get(source, oldest)

    def _get(self, source: int, puts: _PendingPuts) -> None:
        assert self._window is not None
        self._window.wait_signal(source)
        first = self._inbox(puts.slot, source)
        puts.place(source).copy_(self._window.memory[first : first + puts.sizes[source]])

    def _put(self, tensor: Tensor, sizes: Sequence[int], slot: int) -> None:
        """Rows go to the own window first: NCCL reads registered memory only. Rotated, so that nobody is first."""
        assert self._window is not None
        rows, starts = _as_bytes(tensor), [sum(sizes[:target]) for target in range(self.num_ranks)]
        for step in range(1, self.num_ranks):
            target = (self.rank + step) % self.num_ranks
            first, size = self._outbox(slot, target), sizes[target]
            self._window.memory[first : first + size] = rows[starts[target] : starts[target] + size]
            # One byte at least: a put of nothing would not signal.
            self._window.put(first, max(1, size), target=target, target_byte=self._inbox(slot, self.rank))

    def _make_room(self, largest: int) -> None:
        """Windows hold the longest message of any rank; they grow when all have emptied theirs."""
        wish = torch.tensor([largest])
        dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=self._control)
        if int(wish) <= self._capacity and self._window is not None:
            return
        while self._flying:
            self.finish(self._flying[-1])
        self._capacity = max(_FIRST_BYTES, 1 << (int(wish) - 1).bit_length())
        dist.barrier(group=self._control)
        places = [self._inbox(slot, source) for slot in range(SLOTS) for source in range(self.num_ranks)]
        self._window = self._open_window(2 * SLOTS * self.num_ranks * self._capacity, places)
        self._number = 0

    def _inbox(self, slot: int, source: int) -> int:
        return (slot * self.num_ranks + source) * self._capacity

    def _outbox(self, slot: int, target: int) -> int:
        return ((SLOTS + slot) * self.num_ranks + target) * self._capacity


def _as_bytes(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)
