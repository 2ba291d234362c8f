"""NCCL's ways without SMs: which versions have which, by a table; padding and windows against stand-ins."""

from __future__ import annotations

import multiprocessing
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from freescale.comm.transport import CollectiveTransport
from freescale.comm.transports import nccl_zero_sm
from freescale.comm.transports.nccl_one_sided import IN_FLIGHT, SLOTS, OneSidedTransport
from freescale.comm.transports.nccl_padded import PaddedTransport
from freescale.comm.transports.nccl_routes import NcclFacts, choose_route, parse_version
from freescale.comm.world.facts import GroupFacts, RankFacts
from freescale.errors import TrainingError
from tests.comm.test_transport import exchange_cases
from tests.ranks import run_on_ranks

# What a wheel of torch brings: its version and NCCL's.
WHEELS = {
    "2.11": ((2, 11), (2, 28, 9)),
    "2.12": ((2, 12), (2, 29, 7)),
    "2.13": ((2, 13), (2, 29, 7)),
    "2.14": ((2, 14), (2, 30, 7)),
    "2.15": ((2, 15), (2, 30, 7)),
}


@pytest.mark.parametrize(
    ("wheel", "nodes", "ranks", "nccl2", "zero_cta", "uneven", "route"),
    [
        ("2.11", 1, 8, False, True, 1.0, "padded"),
        ("2.11", 1, 8, False, True, 1.3, "collective"),
        ("2.11", 1, 8, False, False, 1.0, "collective"),
        ("2.11", 1, 2, False, True, 1.0, "collective"),
        ("2.11", 2, 16, False, True, 1.0, "collective"),
        ("2.12", 1, 8, False, True, 1.0, "put_signal"),
        ("2.12", 2, 16, False, True, 9.0, "put_signal"),
        ("2.13", 4, 32, True, True, 1.0, "put_signal"),
        ("2.13", 32, 256, False, True, 1.0, "collective"),
        ("2.14", 1, 8, True, True, 9.0, "window"),
        ("2.14", 4, 32, True, False, 9.0, "window"),
        ("2.14", 4, 32, False, True, 9.0, "put_signal"),
        ("2.15", 12, 100, True, True, 9.0, "window"),
        ("2.15", 13, 101, True, True, 1.1, "padded"),
        ("2.15", 13, 101, True, True, 1.21, "collective"),
        ("2.15", 1, 2, True, True, 1.0, "window"),
    ],
)
def test_the_route_of_every_version(wheel, nodes, ranks, nccl2, zero_cta, uneven, route):
    torch_version, nccl = WHEELS[wheel]
    facts = NcclFacts(torch_version, nccl, num_nodes=nodes, num_ranks=ranks, nccl2=nccl2, zero_cta=zero_cta)
    chosen = choose_route(facts, uneven=uneven)
    assert chosen.name == route
    assert chosen.sm_free == (route != "collective")
    before = ["window", "put_signal", "padded"]
    refused = before if route == "collective" else before[: before.index(route)]
    assert [name for name in before if f"no {name}: " in chosen.reason] == refused


@pytest.mark.parametrize(
    ("nccl", "ranks", "route"),
    [
        ((2, 27, 7), 8, "collective"),
        ((2, 28, 0), 8, "padded"),
        ((2, 31, 1), 2, "collective"),
        ((2, 31, 2), 2, "padded"),
    ],
)
def test_a_newer_library_beside_an_older_torch(nccl, ranks, route):
    assert choose_route(NcclFacts((2, 11), nccl, num_nodes=1, num_ranks=ranks)).name == route


@pytest.mark.parametrize(
    ("nccl", "route"), [((2, 28, 9), "collective"), ((2, 30, 6), "collective"), ((2, 30, 7), "padded")]
)
def test_across_machines_padding_needs_more(nccl, route):
    assert choose_route(NcclFacts((2, 11), nccl, num_nodes=2, num_ranks=16)).name == route


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.11.0+cu130", (2, 11, 0)),
        ("2.15.0a0+git1", (2, 15, 0)),
        ("2.13.0rc1", (2, 13, 0)),
        ("2.14", (2, 14)),
    ],
)
def test_versions_are_read(text, numbers):
    assert parse_version(text) == numbers


class PlainBuffers:
    """Ordinary memory, full of garbage."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.sizes.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)


def start_equal(received: torch.Tensor, sent: torch.Tensor) -> Any:
    return dist.all_to_all_single(received, sent, group=dist.group.WORLD, async_op=True)


def padded(rank: int, num_ranks: int) -> None:
    buffers, uneven = PlainBuffers(), CollectiveTransport(dist.group.WORLD)
    transport = PaddedTransport(
        exchange=start_equal, buffers=buffers, uneven=uneven, control=dist.new_group(), reason="a test"
    )
    exchange_cases(transport, rank, num_ranks)
    assert transport.num_padded >= 40  # the counts at least
    assert (transport.num_uneven > 0) == (num_ranks > 1)
    rows = torch.arange(7 * num_ranks, dtype=torch.float64)[:, None] + 1000 * rank
    before = transport.num_padded, transport.num_uneven
    for _ in range(5):  # not waited for: slots come round
        nearly = transport.start(rows, send=[7] * num_ranks, receive=[7] * num_ranks)
    wanted = torch.cat([rows[:7] - 1000 * rank + 1000 * source + 7 * rank for source in range(num_ranks)])
    assert torch.equal(nearly.wait(), wanted)
    assert (transport.num_padded, transport.num_uneven) == (before[0] + 5, before[1])
    everybody: list[Any] = [None] * num_ranks
    dist.all_gather_object(everybody, buffers.sizes)
    assert all(sizes == buffers.sizes for sizes in everybody), "registering is a collective"
    assert all(size & (size - 1) == 0 for size in buffers.sizes)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_padded_rows_arrive_without_their_padding(num_ranks):
    run_on_ranks(padded, num_ranks, num_ranks)


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

    def _get(self, source: int, slot: int, num_bytes: int) -> torch.Tensor:
        rows = super()._get(source, slot, num_bytes)
        self.unread[self.rank][slot * self.num_ranks + source] = 0
        return rows

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


def facts_of(*, backend: str = "nccl", shared: bool = False, machines: int = 1) -> GroupFacts:
    ranks = [
        RankFacts(machine=f"m{n % machines}", pid=n, processes="p", gpu="g" if shared else f"g{n}")
        for n in range(4)
    ]
    return GroupFacts(ranks, 0, torch.device("cuda", 0), backend)


def test_the_transport_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(nccl_zero_sm.torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(nccl_zero_sm, "nccl_version", lambda: (2, 28, 9))
    monkeypatch.delenv("NCCL_CTA_POLICY", raising=False)
    assert nccl_zero_sm.why_not(facts_of()) is None
    assert "share" in (nccl_zero_sm.why_not(facts_of(shared=True)) or "")
    assert "gloo" in (nccl_zero_sm.why_not(facts_of(backend="gloo")) or "")
    assert "several machines" in (nccl_zero_sm.why_not(facts_of(machines=2)) or "")
    monkeypatch.setenv("NCCL_CTA_POLICY", "1")
    assert "NCCL_CTA_POLICY" in (nccl_zero_sm.why_not(facts_of()) or "")


@pytest.mark.parametrize(
    ("version", "asked", "route"),
    [
        ("2.14.1", None, "put_signal"),
        ("2.14.1", "1", "window"),
        ("2.15.0", None, "window"),
        ("2.15.0", "0", "put_signal"),
    ],
)
def test_the_newer_backend_is_asked_for_or_the_default(monkeypatch, version, asked, route):
    monkeypatch.setattr(nccl_zero_sm.torch, "__version__", version)
    monkeypatch.setattr(nccl_zero_sm, "nccl_version", lambda: (2, 30, 7))
    if asked is None:
        monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    else:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", asked)
    assert nccl_zero_sm.route_of(facts_of(machines=2)).name == route


def test_windows_of_torch_are_called_with_what_they_take():
    calls: list[Any] = []
    window = nccl_zero_sm.C10dWindow.__new__(nccl_zero_sm.C10dWindow)
    window.memory = torch.arange(10, dtype=torch.uint8)
    window._window = types.SimpleNamespace(
        put=lambda rows, target, place, later: calls.append((rows.tolist(), target, place, later)),
        wait_signal=lambda source, later: calls.append((source, later)),
    )
    window.put(3, 2, target=1, target_byte=7)
    window.wait_signal(2)
    symmetric = nccl_zero_sm.SymmetricWindow.__new__(nccl_zero_sm.SymmetricWindow)
    symmetric.memory, symmetric._whole, symmetric._places = window.memory, "whole", {7: "handle of 7"}
    symmetric._calls = types.SimpleNamespace(
        put_signal=lambda rows, handle, target: calls.append((rows.tolist(), handle, target)),
        wait_signal=lambda handle, source: calls.append((handle, source)),
    )
    symmetric.put(3, 2, target=1, target_byte=7)
    symmetric.wait_signal(2)
    assert calls == [([3, 4], 1, 7, False), (2, False), ([3, 4], "handle of 7", 1), ("whole", 2)]


def test_a_handle_is_made_for_its_place_in_the_window(monkeypatch):
    """As torch makes them: from where the storage of a tensor begins, whatever the view."""
    import torch.distributed._symmetric_memory as real

    memory = torch.zeros(64, dtype=torch.uint8)

    def rendezvous(tensor: torch.Tensor, group: object) -> Any:
        return types.SimpleNamespace(offset=tensor.untyped_storage().data_ptr() - memory.data_ptr())

    monkeypatch.setattr(real, "set_backend", lambda name: None)
    monkeypatch.setattr(real, "empty", lambda *_, **__: memory)
    monkeypatch.setattr(real, "rendezvous", rendezvous)
    window = nccl_zero_sm.SymmetricWindow(None, 64, [0, 16, 48], torch.device("cpu"))  # type: ignore[arg-type]
    assert {place: handle.offset for place, handle in window._places.items()} == {0: 0, 16: 16, 48: 48}
    monkeypatch.setattr(real, "rendezvous", lambda *_: types.SimpleNamespace(offset=0))
    with pytest.raises(TrainingError, match="no handle for a place"):
        nccl_zero_sm.SymmetricWindow(None, 64, [16], torch.device("cpu"))  # type: ignore[arg-type]
