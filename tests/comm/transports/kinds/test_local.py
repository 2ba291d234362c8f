"""Sockets between ranks of one machine: what the collective delivers, and no rank waits in vain."""

from __future__ import annotations

import contextlib
import random
import socket
import time

import pytest
import torch
import torch.distributed as dist

from freescale.comm import exchange_counts
from freescale.comm.traffic.deterministic_all_reduce import start_all_reduce
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.kinds.local import SocketTransport
from freescale.comm.transports.registry import make_transport
from freescale.comm.world.facts import on_one_machine
from freescale.embedding import Adam
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from tests.other_user import in_own_network, only_root, start_as_other_user, unix_names, wait_for
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.timed

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def same_as_collective(rank: int, num_ranks: int) -> None:
    local, collective = SocketTransport(dist.group.WORLD), CollectiveTransport(dist.group.WORLD)
    assert (local.rank, local.num_ranks) == (rank, num_ranks)
    rng, on_the_way = random.Random(3), []
    for _ in range(60):
        dtype, width = rng.choice(DTYPES), rng.choice([(), (1,), (64,), (2, 3), (0,)])
        most = rng.choice([0, 1, 5, 3000])
        counts = [[rng.randint(0, most) for _ in range(num_ranks)] for _ in range(num_ranks)]
        send, receive = counts[rank], [row[rank] for row in counts]
        rows = torch.randint(-99, 99, (sum(send), *width)).to(dtype)
        assert exchange_counts(local, torch.tensor(send)).tolist() == receive
        wanted = collective.start(rows, send=send, receive=receive).wait()
        on_the_way.append((local.start(rows, send=send, receive=receive), wanted))
        rng.shuffle(on_the_way)
        while on_the_way and rng.random() < 0.5:
            pending, wanted = on_the_way.pop()
            assert torch.equal(pending.wait(), wanted)
    for pending, wanted in on_the_way:
        assert torch.equal(pending.wait(), wanted)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_it_delivers_what_the_collective_delivers(num_ranks):
    run_on_ranks(same_as_collective, num_ranks, num_ranks)


def add_up(rank: int, num_ranks: int) -> list[bytes]:
    """Sums of values small and large, two under way at a time; their bits."""
    transport, bits = SocketTransport(dist.group.WORLD), []
    for shape in ((0,), (1,), (3, 5), (70_001,)):
        for dtype in (torch.float32, torch.float64):
            values = [
                torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in range(num_ranks)
            ]
            mine = values[rank].clone()
            first, second = start_all_reduce(transport, mine), start_all_reduce(transport, 2 * mine)
            wanted = values[0].clone()
            for other in values[1:]:
                wanted += other
            assert torch.equal(second.wait(), 2 * wanted)
            got = first.wait()
            assert got.shape == wanted.shape
            assert torch.equal(got, wanted)
            assert torch.equal(mine, values[rank])
            bits.append(got.numpy().tobytes())
    return bits


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_sums_are_added_in_rank_order_and_equal_on_every_rank(num_ranks):
    first, *others = run_on_ranks(add_up, num_ranks, num_ranks)
    assert all(other == first for other in others)


def start_and_leave(rank: int) -> float:
    """More than any socket holds, under way while both ranks meet elsewhere, one of them having waited before."""
    transport = SocketTransport(dist.group.WORLD)
    rows = torch.full((300_000, 16), float(rank))
    counts = [150_000, 150_000]
    first, second = (transport.start(rows, send=counts, receive=counts) for _ in range(2))
    if rank == 0:
        first.wait()
    dist.barrier()
    return float(first.wait().sum() + second.wait().sum())


def test_a_rank_busy_elsewhere_holds_nobody_up():
    assert run_on_ranks(start_and_leave, 2, timeout=100) == [2 * 150_000 * 16.0] * 2


def intrude() -> list[str]:
    """As another user: be rank 1 wherever a rank listens, and be silent there, too."""
    held, deadline = [], time.monotonic() + 2
    while time.monotonic() < deadline:
        for name in unix_names():
            for words in (b"", (1).to_bytes(4, "little")):
                caller = socket.socket(socket.AF_UNIX)
                caller.settimeout(0.1)
                held.append(caller)
                with contextlib.suppress(OSError):
                    caller.connect(name)
                    caller.sendall(words)
        time.sleep(0.002)
    return unix_names()


def exchange_under_attack(rank: int) -> list[int]:
    transport = SocketTransport(dist.group.WORLD, timeout_s=20)
    time.sleep(0.5 * rank)  # the intruder is first
    return exchange_counts(transport, torch.tensor([10 * rank, 10 * rank + 1])).tolist()


@only_root
def test_another_user_neither_takes_the_place_of_a_rank_nor_holds_one_up():
    def attacked() -> list[list[int]]:
        intruder = start_as_other_user(intrude)
        try:
            return run_on_ranks(exchange_under_attack, 2, timeout=100)
        finally:
            wait_for(intruder)

    assert in_own_network(attacked) == [[0, 10], [1, 11]]


def leave_early(rank: int) -> str:
    transport = SocketTransport(dist.group.WORLD)
    exchange_counts(transport, torch.ones(2, dtype=torch.int64))
    if rank == 1:
        return ""  # its sockets close with it
    with pytest.raises(ConnectionError) as caught:
        transport.start(torch.ones(4, 3), send=[0, 4], receive=[0, 4]).wait()
    return str(caught.value)


def test_a_rank_that_has_gone_is_named():
    assert "rank 1 has closed its connection" in run_on_ranks(leave_early, 2, timeout=100)[0]


def wait_in_vain(rank: int) -> str:
    transport = SocketTransport(dist.group.WORLD, timeout_s=0.2)
    exchange_counts(transport, torch.ones(2, dtype=torch.int64))
    if rank == 0:
        with pytest.raises(TimeoutError) as caught:
            exchange_counts(transport, torch.ones(2, dtype=torch.int64))
    dist.barrier()
    return str(caught.value) if rank == 0 else ""


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over():
    assert "ranks [1] did not exchange rows" in run_on_ranks(wait_in_vain, 2, timeout=100)[0]


def forget(rank: int) -> int:
    """Threads that look after transports which nobody holds any more."""
    import threading

    for _ in range(5):
        exchange_counts(SocketTransport(dist.group.WORLD), torch.ones(2, dtype=torch.int64))
    deadline = time.monotonic() + 30
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.active_count()


def test_a_transport_leaves_nothing_behind():
    assert run_on_ranks(forget, 2, timeout=100) == [1, 1]


def trained(rank: int) -> bool:
    """Both transports give the same bits."""
    spec = TableSpec(name="item", num_rows=50, dim=8, optimizer=Adam())
    transports = [SocketTransport(dist.group.WORLD), CollectiveTransport(dist.group.WORLD)]
    tables = [ShardedEmbedding([spec], group=dist.group.WORLD, transport=each) for each in transports]
    rng = random.Random(rank)
    for _ in range(5):
        ids = torch.tensor([rng.randrange(50) for _ in range(100)])
        for table in tables:
            table({"item": ids})["item"].square().sum().backward()
            table.step(lr=0.1)
    return torch.equal(*(table.tables["item"].weight for table in tables))


def test_training_is_the_same_on_both():
    assert run_on_ranks(trained, 3) == [True] * 3


@pytest.mark.parametrize(
    ("world", "local", "yes"), [("2", "2", True), ("4", "2", False), ("2", None, False), (None, None, False)]
)
def test_one_machine_is_what_the_launcher_says(monkeypatch, world, local, yes):
    monkeypatch.setattr("sys.platform", "linux")
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert on_one_machine() is yes


def chosen(rank: int, **options: str) -> str:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return make_transport(dist.group.WORLD, **options).name


def chosen_all(rank: int) -> list[str]:
    return [chosen(rank), chosen(rank, kind="collective"), chosen(rank, device="cuda")]


def test_cpu_ranks_of_one_machine_use_it_unless_told_otherwise():
    assert run_on_ranks(chosen_all, 2)[0] == ["local", "collective", "collective"]
