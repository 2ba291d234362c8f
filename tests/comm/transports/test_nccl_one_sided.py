"""Rows by one-sided puts, against a window in shared memory: nothing is written before it was read."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from freescale.comm.transports.nccl_one_sided import IN_FLIGHT, SLOTS, OneSidedTransport
from tests.comm.test_transport import exchange_cases
from tests.ranks import run_on_ranks


class FakeWindow:
    """Shared memory and semaphores: a put always signals, a wait takes one signal."""

    def __init__(self, rank: int, shared: list[torch.Tensor], signals: Any) -> None:
        self.memory, self._rank, self._shared, self._signals = shared[rank], rank, shared, signals

    def put(self, first_byte: int, num_bytes: int, *, target: int, target_byte: int) -> None:
        assert num_bytes > 0
        source = self.memory[first_byte : first_byte + num_bytes]
        self._shared[target][target_byte : target_byte + num_bytes] = source
        self._signals[self._rank][target].release()

    def wait_signal(self, source: int) -> None:
        assert self._signals[source][self._rank].acquire(timeout=40)


class CheckedTransport(OneSidedTransport):
    """Notes which places hold rows that were not read; nobody may put there."""

    unread: list[torch.Tensor]

    def _get(self, source: int, puts: Any) -> None:
        super()._get(source, puts)
        self.unread[self.rank][puts.slot * self.num_ranks + source] = 0

    def _put(self, tensor: torch.Tensor, sizes: Any, slot: int) -> None:
        for target in range(self.num_ranks):
            if target != self.rank:
                place = slot * self.num_ranks + self.rank
                assert not self.unread[target][place], f"exchange {self._number}: slot {slot} was not read"
                self.unread[target][place] = 1
        super()._put(tensor, sizes, slot)


def through_windows(rank: int, num_ranks: int, shared: Any, unread: Any, signals: Any) -> None:
    opened = []

    def open_window(num_bytes: int, places: Any) -> FakeWindow:
        assert num_bytes <= len(shared[rank])
        assert len(places) == SLOTS * num_ranks
        unread[rank].zero_()
        dist.barrier()
        opened.append(num_bytes)
        return FakeWindow(rank, shared, signals)

    control = dist.new_group()
    transport = CheckedTransport(open_window, control=control, engine="puts", reason="a test")
    transport.unread = unread
    exchange_cases(transport, rank, num_ranks)
    rows = torch.arange(30_000 * num_ranks, dtype=torch.int32)
    for turn in range(12):
        pending = transport.start(rows + turn, send=[30_000] * num_ranks, receive=[30_000] * num_ranks)
        if rank == turn % num_ranks:
            assert int(pending.wait()[0]) == 30_000 * rank + turn
    assert len(opened) == 2, "it grew once"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_travel_by_puts_and_no_slot_is_written_before_it_is_read(num_ranks):
    shared = [torch.zeros(16 << 20, dtype=torch.uint8).share_memory_() for _ in range(num_ranks)]
    unread = [torch.zeros(SLOTS * num_ranks, dtype=torch.uint8).share_memory_() for _ in range(num_ranks)]
    context = multiprocessing.get_context("fork")
    signals = [[context.Semaphore(0) for _ in range(num_ranks)] for _ in range(num_ranks)]
    run_on_ranks(through_windows, num_ranks, num_ranks, shared, unread, signals)


class CopiesOnly(TorchDispatchMode):
    """Refuses what a GPU would start a kernel for: only memory, views of it and whole copies are left."""

    allowed = ("empty", "new_empty", "view", "_unsafe_view", "slice", "copy_", "detach", "alias", "select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        on_cpu_alone = name in ("tensor", "lift_fresh", "_local_scalar_dense", "zeros")  # agreeing on sizes
        assert name in self.allowed or on_cpu_alone or "allreduce" in name, f"{name} is a kernel"
        return func(*args, **(kwargs or {}))


def only_copies(rank: int, shared: Any, signals: Any) -> None:
    transport = OneSidedTransport(
        lambda size, places: FakeWindow(rank, shared, signals),
        control=dist.new_group(),
        engine="puts",
        reason="a test",
    )
    rows = torch.arange(96, dtype=torch.float32).view(24, 4)
    transport.start(rows, send=[8, 16], receive=[8, 8] if rank == 0 else [16, 16]).wait()  # opens a window
    with CopiesOnly():
        transport.start(rows, send=[8, 16], receive=[8, 8] if rank == 0 else [16, 16]).wait()


def test_rows_are_copied_to_their_places_and_no_kernel_joins_them():
    """Joined by `torch.cat`, rows were copied twice."""
    shared = [torch.zeros(16 << 20, dtype=torch.uint8).share_memory_() for _ in range(2)]
    context = multiprocessing.get_context("fork")
    signals = [[context.Semaphore(0) for _ in range(2)] for _ in range(2)]
    run_on_ranks(only_copies, 2, shared, signals)


@given(schedule=st.lists(st.integers(0, 2), min_size=20, max_size=120))
def test_four_slots_are_enough_whatever_the_ranks_do_in_which_order(schedule):
    """The rule alone: start e after finishing e - 2, finish e after everybody has started it."""
    started, finished = [0] * 3, [0] * 3
    for rank in schedule:
        number = started[rank]
        if number - finished[rank] < IN_FLIGHT:
            overwritten = number - SLOTS
            assert all(overwritten < finished[other] for other in range(3) if other != rank)
            started[rank] += 1
        elif all(count > finished[rank] for count in started):
            finished[rank] += 1
