"""Rows through shared memory between CPU ranks: what the collective delivers, and no rank waits in vain."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from freescale.comm import exchange_counts
from freescale.comm.rings import cpu_engine, ring_transport
from freescale.comm.rings.ring_transport import RingTransport
from freescale.comm.rings.rounds import EPOCHS, Rings
from freescale.comm.rings.shared_memory import together
from freescale.comm.transports.kinds import host_staged
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.registry import make_transport
from freescale.comm.world.facts import gather_facts
from freescale.errors import FreeScaleError, TrainingError
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.timed

FIRST_LOOK = ring_transport._FIRST_LOOKS[0]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]


def open_staged(*, timeout_s: float = 60.0, **rings: int) -> RingTransport:
    group = dist.group.WORLD
    facts = gather_facts(group, torch.device("cpu"))
    made = host_staged.HostStagedRoute.build(
        group, facts, timeout_s, rings=Rings(dist.get_world_size(), **rings)
    )
    assert isinstance(made, RingTransport)
    return made


def same_as_collective(rank: int, num_ranks: int, rings: dict[str, int]) -> None:
    staged, collective = open_staged(**rings), CollectiveTransport(dist.group.WORLD)
    assert (staged.rank, staged.num_ranks, staged.name) == (rank, num_ranks, "host_staged")
    rng, on_the_way = random.Random(3), []
    for _ in range(60):
        dtype, width = rng.choice(DTYPES), rng.choice([(), (1,), (64,), (2, 3), (0,)])
        most = rng.choice([0, 1, 5, 3000])
        counts = [[rng.choice([0, rng.randint(0, most)]) for _ in range(num_ranks)] for _ in range(num_ranks)]
        send, receive = counts[rank], [row[rank] for row in counts]
        rows = torch.randint(0, 99, (sum(send), *width)).to(dtype)
        assert exchange_counts(staged, torch.tensor(send)).tolist() == receive
        wanted = collective.start(rows, send=send, receive=receive).wait()
        on_the_way.append((staged.start(rows, send=send, receive=receive), wanted))
        rng.shuffle(on_the_way)
        while len(on_the_way) > 3 or (on_the_way and rng.random() < 0.5):
            pending, wanted = on_the_way.pop()
            assert torch.equal(pending.wait(), wanted)
    for pending, wanted in on_the_way:
        assert torch.equal(pending.wait(), wanted)


@pytest.mark.parametrize(
    ("num_ranks", "rings"),
    [(1, {}), (2, {"slot_bytes": 4096, "num_slots": 1}), (3, {"first_epoch": EPOCHS - 40}), (4, {})],
)
def test_it_delivers_what_the_collective_delivers(num_ranks, rings):
    run_on_ranks(same_as_collective, num_ranks, num_ranks, rings)


def grow(rank: int) -> list[int]:
    """Messages that get larger, on one rank only; slots follow on every rank, at the same exchange."""
    staged, sizes = open_staged(slot_bytes=1 << 16), []
    for number in range(70):
        large = 1_100_000 if number > 20 else 600_000
        send = [0, large] if rank == 0 else [0, 5]
        receive = [0, 0] if rank == 0 else [large, 5]
        rows = torch.arange(sum(send), dtype=torch.int32) + number
        pending = staged.start(rows, send=send, receive=receive)
        if number % 3:
            got = pending.wait()
            wanted = torch.arange(large, dtype=torch.int32) + number
            assert rank == 0 or torch.equal(got[:large], wanted)
        sizes.append(staged.slot_bytes)
    return [sizes[5], sizes[20], sizes[69]]


def test_slots_grow_with_the_messages_of_any_rank():
    assert run_on_ranks(grow, 2, timeout=110) == [[1 << 16, 1 << 20, 1 << 21]] * 2


class TakenMeanwhile(deque[Any]):
    """Rounds that the thread beside the ranks does right after somebody has seen that there are some."""

    engine: Any = None

    def __bool__(self) -> bool:
        found, engine, self.engine = len(self) > 0, self.engine, None
        if engine is not None:
            engine.poll()
        return found


def drain_beside_the_thread(rank: int) -> float:
    """All has come when rank 0 looks at what is under way, and its thread does it between two looks."""
    cpu_engine._NUDGE_S = 1000.0  # the thread itself keeps away
    staged = open_staged()
    if rank == 1:
        dist.barrier()  # rank 0 has begun, and found nothing
    pending = staged.start(torch.ones(2), send=[1, 1], receive=[1, 1])
    if rank == 0:
        dist.barrier()
    dist.barrier()
    engine: Any = staged._engine
    if rank == 0:
        engine._sides = tuple(map(TakenMeanwhile, engine._sides))
        engine._sides[1].engine = engine
        assert len(engine._sides[1]) == 1, "what rank 1 has sent is still to be taken"
    engine.drain()
    return float(pending.wait().sum())


def test_slots_that_grow_wait_for_rounds_that_the_thread_takes_over():
    """It may do the last round after the look at whether there is one: that was an IndexError, now and then."""
    assert run_on_ranks(drain_beside_the_thread, 2) == [2.0, 2.0]


def start_and_leave(rank: int) -> float:
    """More than any ring holds, under way while both ranks meet elsewhere, one of them having waited before."""
    staged = open_staged(slot_bytes=4096, num_slots=2)
    rows = torch.full((30_000, 16), float(rank))
    counts = [15_000, 15_000]
    first, second = (staged.start(rows, send=counts, receive=counts) for _ in range(2))
    if rank == 0:
        first.wait()
    dist.barrier()
    return float(first.wait().sum() + second.wait().sum())


def test_a_rank_busy_elsewhere_holds_nobody_up():
    assert run_on_ranks(start_and_leave, 2, timeout=120) == [2 * 15_000 * 16.0] * 2


def meet_slowly(rank: int) -> bool:
    staged, rng = open_staged(slot_bytes=4096), random.Random(rank)
    right = True
    for number in range(20):
        if rng.random() < 0.3:
            time.sleep(0.03)  # the others wait in their rings meanwhile
        rows = torch.full((300, 50), 10 * number + rank)
        got = staged.start(rows, send=[100] * 3, receive=[100] * 3).wait()
        right &= torch.equal(got[::100, 0], 10 * number + torch.arange(3))
    return right


def test_slow_ranks_are_waited_for():
    assert run_on_ranks(meet_slowly, 3) == [True] * 3


def close_connections() -> None:
    """Those to other ranks by the group; pipes and local sockets stay."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                os.close(int(name))


def lose_one(rank: int, folder: Path, exchanges: int, connected: bool) -> None:
    """Rank 1 is killed in the middle of a run; the others write down what they hear of it. The time-out is far away."""
    staged = open_staged(timeout_s=100)
    for _ in range(exchanges):
        staged.start(torch.ones(30, 4), send=[10] * 3, receive=[10] * 3).wait()
    if rank == 1:
        if os.fork() == 0:
            # Keeps the rank's pipe open, so that nobody is ended before the others have spoken.
            if not connected:
                close_connections()
            deadline = time.monotonic() + 60
            while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ConnectionError) as caught:
        staged.start(torch.ones(30, 4), send=[10] * 3, receive=[10] * 3).wait()
    (folder / f"{rank}.part").write_text(str(caught.value))
    (folder / f"{rank}.part").rename(folder / f"{rank}.txt")
    time.sleep(60)


@pytest.mark.parametrize(
    ("exchanges", "connected"), [(5, True), (FIRST_LOOK - 1, True), (FIRST_LOOK - 1, False)]
)
def test_a_killed_rank_is_named_by_the_others_before_the_time_is_over(tmp_path, exchanges, connected):
    """In an exchange, and where ranks agree on the size of slots: whether a child keeps its connections or not."""
    with pytest.raises(AssertionError, match="rank 1 died with exit code -9"):
        run_on_ranks(lose_one, 3, tmp_path, exchanges, connected, timeout=100)
    describe_transport = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(describe_transport) == ["0.txt", "2.txt"]
    for text in describe_transport.values():
        assert "ranks [1] have ended" in text


def wait_in_vain(rank: int) -> str:
    staged = open_staged()
    exchange_counts(staged, torch.ones(3, dtype=torch.int64))
    staged._engine._timeout_s = 0.3
    text = ""
    if rank != 1:
        with pytest.raises(TimeoutError) as caught:
            exchange_counts(staged, torch.ones(3, dtype=torch.int64))
        text = str(caught.value)
    dist.barrier()
    return text


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over():
    first, _, last = run_on_ranks(wait_in_vain, 3, timeout=120)
    assert "ranks [1] did not exchange rows within 0 s" in first
    assert "ranks [1] did not exchange rows" in last


def mapped() -> int:
    """Pieces of our memory that this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:freescale")


def leave_nothing(rank: int) -> list[int]:
    """Files, maps and threads that are left of transports nobody holds any more."""
    names = set(os.listdir("/dev/shm"))
    for _ in range(3):
        staged = open_staged()
        exchange_counts(staged, torch.ones(2, dtype=torch.int64))
        assert mapped() == 1
        assert not [name for name in set(os.listdir("/dev/shm")) - names if "freescale" in name]
        del staged
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (mapped() or threading.active_count() > 1):
        time.sleep(0.01)
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert not [each for each in open_files if "memfd:freescale" in each or "pidfd" in each]
    return [mapped(), threading.active_count()]


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_nothing_is_left_and_nothing_ever_has_a_name():
    assert run_on_ranks(leave_nothing, 2, timeout=120) == [[0, 1]] * 2


def chosen(rank: int) -> list[str]:
    staged = make_transport(dist.group.WORLD, kind="host_staged")
    texts = [staged.name, staged.engine, str(staged.sm_free), staged.reason]
    for kind, device in (("host_stagged", "cpu"), ("local", "cuda")):
        with pytest.raises(FreeScaleError) as caught:
            make_transport(dist.group.WORLD, kind=kind, device=device)
        texts.append(str(caught.value))
    return texts


def test_it_is_used_when_a_recipe_names_it_and_refused_with_a_reason():
    name, engine, sm_free, reason, misspelt, refused = run_on_ranks(chosen, 2)[0]
    assert (name, engine, sm_free) == ("host_staged", "shared memory", "True")
    assert "as the recipe says" in reason
    assert "did you mean 'host_staged'" in misspelt
    assert "comm.transport=local cannot be used here: sockets carry CPU tensors only" in refused


def fail_together(rank: int) -> str:
    def act() -> int:
        if rank == 1:
            raise OSError("no memory left")
        return 3

    with pytest.raises(TrainingError) as caught:
        together(dist.group.WORLD, act, what="it cannot be set up")
    return str(caught.value)


def test_what_fails_on_one_rank_is_said_on_all():
    for text in run_on_ranks(fail_together, 2):
        assert "it cannot be set up: on rank 1, OSError: no memory left" in text
