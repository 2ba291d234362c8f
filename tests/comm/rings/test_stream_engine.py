"""The engines of GPU ranks with threads in place of streams: calls, order, growth, ranks that do not come."""

from __future__ import annotations

import itertools
import os
import random
import signal
import struct
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from freescale.comm import exchange_counts
from freescale.comm.rings import cuda_driver, ring_transport, stream_engine
from freescale.comm.rings.cuda_driver import CudaDriver, pack_operations
from freescale.comm.rings.ring_transport import RingTransport
from freescale.comm.rings.rounds import EPOCHS, Cut, Rings, rings_of_gpus
from freescale.comm.rings.shared_memory import share_memory
from freescale.comm.transport import own_group
from freescale.comm.transports.host_staged_multinode import MultinodeStagedTransport
from freescale.comm.transports.kinds import copy_engine
from freescale.comm.transports.registry import find_transport_kind
from freescale.comm.world.facts import GroupFacts, RankFacts, gather_facts
from freescale.errors import TrainingError
from tests.comm.fake_cuda import FakeDriver, FakeEvent, FakeStream, install
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.timed

CUDA = torch.device("cuda", 0)


def gpu_facts(*, one_gpu: bool = True) -> GroupFacts:
    real = gather_facts(dist.group.WORLD, torch.device("cpu"))
    gpus = ["GPU-0" if one_gpu else f"GPU-{rank}" for rank in range(len(real.ranks))]
    ranks = [
        RankFacts(each.machine, each.pid, each.processes, gpu, frozenset(gpus))
        for each, gpu in zip(real.ranks, gpus)
    ]
    return GroupFacts(ranks, real.rank, CUDA, "gloo")


def fake_symmetric_memory(rings: Rings, control: dist.ProcessGroup, device: torch.device) -> Any:
    """Memory of all ranks side by side in shared memory."""
    size = copy_engine.symmetric_bytes(rings)
    room = Rings(1, slot_bytes=size * rings.num_ranks, num_slots=1)
    memory = share_memory(
        control, Rings(rings.num_ranks, slot_bytes=room.slot_bytes, num_slots=1), timeout_s=60
    )
    addresses = [memory.address + size * rank for rank in range(rings.num_ranks)]
    first = size * dist.get_rank(control)
    own = torch.from_numpy(memory.bytes[first : first + size])
    KEPT.append(memory)
    return own, addresses


KEPT: list[Any] = []


def open_fake(
    kind: str, *, timeout_s: float = 60.0, slow_s: float = 0.0, one_queue: bool = False, **rings: int
) -> tuple[RingTransport, FakeStream, FakeDriver]:
    main, driver = install(), FakeDriver(slow_s=slow_s)
    if one_queue:
        torch.cuda.Stream = lambda *_, **__: main  # type: ignore[misc, assignment]
    copy_engine.map_symmetric_memory = fake_symmetric_memory
    route: Any = find_transport_kind(kind)
    sizes = Rings(dist.get_world_size(), **rings)
    made = route.build(dist.group.WORLD, gpu_facts(), timeout_s, rings=sizes, driver=driver)
    assert isinstance(made, RingTransport)
    return made, main, driver


def exchange_many(rank: int, num_ranks: int, kind: str, rings: dict[str, int]) -> None:
    transport, main, driver = open_fake(kind, **rings)
    assert transport.sm_free is (kind == "host_staged")
    rng, on_the_way = random.Random(7), []
    for number in range(30):
        most = rng.choice([0, 1, 300, 5000])
        counts = [[rng.choice([0, rng.randint(0, most)]) for _ in range(num_ranks)] for _ in range(num_ranks)]
        send, receive = counts[rank], [row[rank] for row in counts]
        rows = torch.cat([block(number, rank, target, send[target]) for target in range(num_ranks)])
        wanted = torch.cat([block(number, source, rank, receive[source]) for source in range(num_ranks)])
        on_the_way.append((transport.start(rows, send=send, receive=receive), wanted))
        rng.shuffle(on_the_way)
        while len(on_the_way) > 3 or (on_the_way and rng.random() < 0.5):
            check(main, *on_the_way.pop())
    while on_the_way:
        check(main, *on_the_way.pop())
    assert len(driver.registered) == 1


def block(number: int, source: int, target: int, count: int) -> torch.Tensor:
    """What a rank sends to another: numbers that name exchange, both ranks and the place."""
    return (torch.arange(3 * count) + 7 * target + 1000 * source + 10_000_000 * number).view(count, 3)


def check(main: FakeStream, pending: Any, wanted: torch.Tensor) -> None:
    got = pending.wait()
    main.synchronize()
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", ["host_staged", "copy_engine"])
@pytest.mark.parametrize(
    ("num_ranks", "rings"),
    [
        (2, {"slot_bytes": 4096, "num_slots": 2, "first_epoch": EPOCHS - 9}),
        (3, {"first_epoch": EPOCHS - 20}),
        # All streams in one hardware queue: whatever waits holds up what was given to any of them later.
        (3, {"slot_bytes": 4096, "num_slots": 4, "one_queue": True}),
    ],
)
def test_rows_arrive_whatever_the_splits(kind, num_ranks, rings):
    run_on_ranks(exchange_many, num_ranks, num_ranks, kind, rings, timeout=110)


def exchange_by_few_queues(rank: int, num_ranks: int, num_queues: int) -> None:
    """Three channels of a rank whose streams share queues: whatever waits holds up what any of them was given later."""
    main = install()
    queues, numbers = [FakeStream() for _ in range(num_queues)], itertools.count(rank)

    class OnOneOfThem(FakeStream):
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            super().__init__(device, priority)
            self._work = queues[next(numbers) % num_queues]._work

    torch.cuda.Stream = OnOneOfThem  # type: ignore[misc]
    route: Any = find_transport_kind("host_staged")
    rings = replace(rings_of_gpus(num_ranks), slot_bytes=4096, cut=Cut(least=4096, most=4096))
    channels = [
        route.build(dist.group.WORLD, gpu_facts(), 20.0, rings=rings, driver=FakeDriver()) for _ in range(3)
    ]
    rng, on_the_way = random.Random(13), []
    for number in range(40):
        most = rng.choice([0, 1, 300, 2000])  # up to twelve rounds
        counts = [[rng.choice([0, rng.randint(0, most)]) for _ in range(num_ranks)] for _ in range(num_ranks)]
        send, receive = counts[rank], [row[rank] for row in counts]
        rows = torch.cat([block(number, rank, target, send[target]) for target in range(num_ranks)])
        wanted = torch.cat([block(number, source, rank, receive[source]) for source in range(num_ranks)])
        on_the_way.append((rng.choice(channels).start(rows, send=send, receive=receive), wanted))
        rng.shuffle(on_the_way)
        while len(on_the_way) > 6 or (on_the_way and rng.random() < 0.4):
            check(main, *on_the_way.pop())
    while on_the_way:
        check(main, *on_the_way.pop())


@pytest.mark.parametrize("num_queues", [1, 2, 5])
def test_channels_whose_streams_share_queues_do_not_wait_for_each_other(num_queues):
    """With rings of two slots they would: the credit of a chunk is written behind the wait for it two chunks later."""
    run_on_ranks(exchange_by_few_queues, 3, 3, num_queues, timeout=100)


def keep_the_lock() -> None:
    """Somebody stands before a full queue and keeps the driver's lock: whoever else asks CUDA stands, too."""
    FakeEvent.query = lambda self: self.synchronize() is None  # type: ignore[method-assign]
    caller = threading.current_thread()

    def behind_the_lock(really: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not caller:
                threading.Event().wait()
            return really(*args, **options)

        return call

    for place, name in (
        *((FakeDriver, name) for name in ("use", "flags", "copy")),
        *((torch.cuda, name) for name in ("stream", "device")),
    ):
        setattr(place, name, behind_the_lock(getattr(place, name)))


def lose_one(rank: int, folder: Path, kind: str, locked: bool = False) -> None:
    """Rank 1 is killed; the others' streams stand still until they are told, and then the CPU hears of it."""
    transport, main, _ = open_fake(kind, timeout_s=100)
    if locked:
        keep_the_lock()
    check(main, transport.start(torch.ones(9), send=[3] * 3, receive=[3] * 3), torch.ones(9))
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)  # the others wait for it, and their threads have looked
        if os.fork() == 0:
            deadline = time.monotonic() + 60
            while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ConnectionError) as caught:
        go_on(transport, main)
    (folder / f"{rank}.part").write_text(str(caught.value))
    (folder / f"{rank}.part").rename(folder / f"{rank}.txt")
    time.sleep(60)


def go_on(transport: RingTransport, main: FakeStream) -> None:
    transport.start(torch.ones(9), send=[3] * 3, receive=[3] * 3).wait()
    main.synchronize()  # where a rank would hang without a thread that looks after it
    transport.start(torch.ones(9), send=[3] * 3, receive=[3] * 3)


@pytest.mark.parametrize("kind", ["host_staged", "copy_engine"])
def test_streams_do_not_wait_for_a_killed_rank(kind, tmp_path):
    with pytest.raises(AssertionError, match="rank 1 died with exit code -9"):
        run_on_ranks(lose_one, 3, tmp_path, kind, timeout=100)
    describe_transport = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(describe_transport) == ["0.txt", "2.txt"]
    assert all("ranks [1] have ended" in text for text in describe_transport.values())


@pytest.mark.parametrize("kind", ["host_staged", "copy_engine"])
def test_a_killed_rank_is_found_without_a_call_of_cuda(kind, tmp_path):
    with pytest.raises(AssertionError, match="rank 1 died with exit code -9"):
        run_on_ranks(lose_one, 3, tmp_path, kind, True, timeout=120)
    describe_transport = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(describe_transport) == ["0.txt", "2.txt"]


def wait_in_vain(rank: int) -> str:
    transport, main, _ = open_fake("host_staged")
    check(main, transport.start(torch.ones(2), send=[1, 1], receive=[1, 1]), torch.ones(2))
    text = ""
    if rank == 0:
        transport._engine._timeout_s = 0.3
        transport.start(torch.ones(2), send=[1, 1], receive=[1, 1]).wait()
        main.synchronize()
        with pytest.raises(TimeoutError) as caught:
            transport.start(torch.ones(2), send=[1, 1], receive=[1, 1])
        text = str(caught.value)
    dist.barrier()
    return text


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over():
    assert "ranks [1] did not exchange rows" in run_on_ranks(wait_in_vain, 2, timeout=120)[0]


def run_ahead(rank: int, own: int) -> tuple[int, int]:
    """Rank 1 does not come, rank 0 goes on: the most that any of its streams has been given by then.

    And how many exchanges are remembered after many that are done.
    """
    transport, main, driver = open_fake("host_staged")
    ring_transport._FIRST_LOOKS, ring_transport._LOOK_EVERY = (
        (),
        1 << 30,
    )  # there rank 0 would wait for the other
    counts = [own, 1] if rank == 0 else [1, own]
    for _ in range(300):
        start_one(transport, counts).wait()
    main.synchronize()
    remembered = len(transport._engine._ahead)
    driver.calls.clear()
    dist.barrier()
    if rank == 0:
        transport._engine._timeout_s = 0.3
        with pytest.raises(TimeoutError):
            start_many(transport, counts, 5000)
    dist.barrier()
    return max(Counter(stream for _, stream, *_ in driver.calls).values(), default=0), remembered


def start_one(transport: RingTransport, counts: list[int]) -> Any:
    return transport.start(torch.ones(sum(counts)), send=counts, receive=counts)


def start_many(transport: RingTransport, counts: list[int], number: int) -> None:
    for _ in range(number):
        start_one(transport, counts)


@pytest.mark.parametrize("own", [0, 1, 1000])
def test_queues_are_not_filled_while_a_rank_does_not_come(own):
    queued, remembered = run_on_ranks(run_ahead, 2, own, timeout=120)[0]
    assert 100 < queued <= stream_engine._MOST_QUEUED
    assert 10 < remembered < stream_engine._MOST_QUEUED / 2


def record_calls(rank: int) -> list[tuple[Any, ...]]:
    """One exchange of two chunks to the other rank, three bytes stay; addresses relative to what they lie in."""
    transport, main, driver = open_fake("host_staged", slot_bytes=65536)
    sent = torch.arange(70_003, dtype=torch.uint8) if rank == 0 else torch.zeros(5, dtype=torch.uint8)
    send, receive = ([3, 70_000], [3, 5]) if rank == 0 else ([5, 0], [70_000, 0])
    pending = transport.start(sent, send=send, receive=receive)
    got = pending.wait()
    main.synchronize()
    base = next(iter(driver.registered))

    def place(address: int) -> Any:
        for name, start, size in (
            ("sent", sent.data_ptr(), sent.nbytes),
            ("got", got.data_ptr(), got.nbytes),
            ("shared", base, 1 << 30),
        ):
            if start <= address < start + size:
                return name, address - start
        return "unknown", address

    calls: list[tuple[Any, ...]] = []
    for kind, stream, *rest in driver.calls:
        if kind == "copy":
            calls.append(("copy", stream, place(rest[0]), place(rest[1]), rest[2]))
        else:
            flags = [[(place(address)[1] // 64, value) for address, value in words] for words in rest]
            calls.append(("flags", stream, *flags))
    return calls


def test_calls_of_one_exchange():
    calls = run_on_ranks(record_calls, 2, timeout=120)[0]
    rings = Rings(2, slot_bytes=65536)
    arrived, released = rings.arrived, rings.released
    leaving, coming = sorted({stream for _, stream, *_ in calls})
    free = [(EPOCHS - 7) % EPOCHS, (EPOCHS - 6) % EPOCHS]
    first, second = (rings.slot_offset(rings.slot(0, 1, epoch)) for epoch in (0, 1))
    assert [call for call in calls if call[1] == leaving] == [
        ("flags", leaving, [], [(released(0, 1), free[0])]),
        ("copy", leaving, ("shared", first), ("sent", 3), 65536),
        ("flags", leaving, [(arrived(0, 1), 1)], [(released(0, 1), free[1])]),
        ("copy", leaving, ("shared", second), ("sent", 3 + 65536), 70_000 - 65536),
        ("flags", leaving, [(arrived(0, 1), 2)], []),
    ]
    # What stays is copied first, in place: nothing that comes has arrived by then.
    assert [call for call in calls if call[1] == coming] == [
        ("copy", coming, ("got", 0), ("sent", 0), 3),
        ("flags", coming, [], [(arrived(1, 0), 1)]),
        ("copy", coming, ("got", 3), ("shared", rings.slot_offset(rings.slot(1, 0, 0))), 5),
        ("flags", coming, [(released(1, 0), 1)], []),
    ]
    # One after the other they would still all be carried out: a round's flags are written before its waits, in which
    # another rank waits for the same.
    first_wait = next(place for place, call in enumerate(calls) if call[:2] == ("flags", coming))
    assert (arrived(0, 1), 1) in [
        word for kind, _, *rest in calls[:first_wait] if kind == "flags" for word in rest[0]
    ]


def taken_by(rank: int) -> tuple[list[int], list[int]]:
    """Bytes copied out of tensors, and into them, where two drivers share the work."""
    main, driver, taking = install(), FakeDriver(), FakeDriver()
    copy_engine.map_symmetric_memory = fake_symmetric_memory
    copy_engine._drivers_of = lambda facts, gpu: (driver, taking, "")  # type: ignore[assignment, return-value]
    route: Any = find_transport_kind("copy_engine")
    transport = route.build(dist.group.WORLD, gpu_facts(one_gpu=False), 60.0, rings=Rings(2))
    send, receive = ([3, 500], [3, 7]) if rank == 0 else ([7, 0], [500, 0])
    rows = torch.full((sum(send),), float(rank + 1))
    wanted = torch.cat([torch.full((count,), float(source + 1)) for source, count in enumerate(receive)])
    check(main, transport.start(rows, send=send, receive=receive), wanted)
    assert not any(kind == "flags" for kind, *_ in taking.calls)
    return tuple([call[-1] for call in each.calls if call[0] == "copy"] for each in (driver, taking))  # type: ignore[return-value]


def test_copies_that_stay_inside_a_gpu_may_have_a_driver_of_their_own():
    assert run_on_ranks(taken_by, 2, timeout=100) == [([2000], [12, 28]), ([28], [2000])]


def grow(rank: int, kind: str) -> list[int]:
    transport, main, driver = open_fake(kind, slot_bytes=1 << 16)
    sizes = []
    for number in range(10):
        rows = torch.full((600_000,), float(10 * number + rank))
        got = transport.start(rows, send=[300_000] * 2, receive=[300_000] * 2).wait()
        main.synchronize()
        assert got[::300_000].tolist() == [10.0 * number, 10.0 * number + 1]
        sizes.append(transport.slot_bytes)
    assert len(driver.registered) == 1
    return [sizes[0], sizes[-1]]


@pytest.mark.parametrize("kind", ["host_staged", "copy_engine"])
def test_slots_grow_and_old_memory_is_let_go(kind):
    assert run_on_ranks(grow, 2, kind, timeout=100) == [[1 << 16, 1 << 19]] * 2


def look_again(rank: int) -> int:
    """Exchanges at which slots are looked at and stay as they are: nothing that is under way is waited for."""
    transport, main, _ = open_fake("host_staged")
    drained, drain = [], transport._engine.drain
    transport._engine.drain = lambda: (drained.append(transport._num_started), drain())  # type: ignore[method-assign]
    for _ in range(600):
        check(main, transport.start(torch.ones(2), send=[1, 1], receive=[1, 1]), torch.ones(2))
    return len(drained)


def test_slots_that_stay_are_looked_at_in_passing():
    assert run_on_ranks(look_again, 2, timeout=100) == [0, 0]


def relay(rank: int) -> bool:
    main = install()
    control = own_group(dist.group.WORLD, backend="gloo", timeout_s=60)
    transport = MultinodeStagedTransport(control, driver=FakeDriver(), device=CUDA)
    assert (transport.name, transport.sm_free) == ("host_staged", True)
    rng, on_the_way = random.Random(5), []
    for number in range(25):
        counts = [[rng.randint(0, 50) for _ in range(2)] for _ in range(2)]
        send, receive = counts[rank], [row[rank] for row in counts]
        rows = torch.cat([block(number, rank, target, send[target]) for target in range(2)])
        wanted = torch.cat([block(number, source, rank, receive[source]) for source in range(2)])
        on_the_way.append((transport.start(rows, send=send, receive=receive), wanted))
        if rng.random() < 0.5:
            check(main, *on_the_way.pop())
    while on_the_way:
        check(main, *on_the_way.pop())
    return exchange_counts(transport, torch.tensor([rank, 5])) is not None


def test_across_machines_a_thread_sends_what_was_copied_down():
    assert run_on_ranks(relay, 2, timeout=120) == [True, True]


# The driver's own calls, with a library that writes them down.


class Library:
    """Looks like libcuda; every call succeeds unless told otherwise."""

    def __init__(self, *, has_batch: bool = True) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.results: dict[str, int] = {}
        self._has_batch = has_batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or (name == "cuMemcpyBatchAsync_v2" and not self._has_batch):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            return self.results.get(name, 0)

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for each, arguments in self.calls if each == name]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library()
    monkeypatch.setattr(cuda_driver, "load_library", lambda: fake)
    return fake


def test_operations_are_packed_as_the_driver_reads_them():
    packed = pack_operations([(2, 0x7F00_0000_1040, EPOCHS - 1), (1, 0x10, 3)])
    assert len(packed) == 96
    write = struct.unpack("<IIQQII QQ".replace(" ", ""), packed[:48])
    assert write == (2, 0, 0x7F00_0000_1040, EPOCHS - 1, 0, 0, 0, 0)
    assert struct.unpack("<IIQQ", packed[48:72]) == (1, 0, 0x10, 3)


def test_flags_go_in_calls_of_less_than_256(library: Library):
    words = [(64 * place, place) for place in range(300)]
    CudaDriver().flags(77, write=words, wait=words)
    calls = library.named("cuStreamBatchMemOp_v2")
    assert [(stream, count) for stream, count, _, _ in calls] == [(77, 255), (77, 255), (77, 90)]
    everything = b"".join(packed for _, _, packed, _ in calls)
    assert everything == pack_operations([(2, *word) for word in words] + [(1, *word) for word in words])


def test_copies_go_one_by_one_or_in_one_call(library: Library):
    copies = [(1, 2, 3), (4, 5, 6)]
    CudaDriver().copy(copies, 9)
    assert library.named("cuMemcpyAsync") == [(1, 2, 3, 9), (4, 5, 6, 9)]
    CudaDriver(batched=True).copy(copies, 9)
    ((targets, sources, sizes, count, attributes, places, num_attributes, stream),) = library.named(
        "cuMemcpyBatchAsync_v2"
    )
    assert (list(targets), list(sources), list(sizes)) == ([1, 4], [2, 5], [3, 6])
    assert (count.value, list(places), num_attributes.value, stream.value) == (2, [0], 1, 9)
    assert struct.unpack("<6I", attributes) == (1, 0, 0, 0, 0, 1)
    CudaDriver(batched=True).copy(copies[:1], 9)
    assert len(library.named("cuMemcpyAsync")) == 3


def test_an_old_driver_copies_one_by_one(monkeypatch: pytest.MonkeyPatch):
    old = Library(has_batch=False)
    monkeypatch.setattr(cuda_driver, "load_library", lambda: old)
    CudaDriver(batched=True).copy([(1, 2, 3), (4, 5, 6)], 9)
    assert len(old.named("cuMemcpyAsync")) == 2


def test_a_context_is_made_current_once_in_every_thread(library: Library):
    import threading

    driver = CudaDriver()
    for _ in range(2):
        driver.use(3)
        thread = threading.Thread(target=lambda: (driver.use(3), driver.use(3)))
        thread.start()
        thread.join()
    assert len(library.named("cuDevicePrimaryCtxRetain")) == 1
    assert len(library.named("cuCtxSetCurrent")) == 3


def test_a_refused_call_is_named(library: Library):
    library.results["cuMemHostRegister_v2"] = 2
    with pytest.raises(TrainingError, match="refused cuMemHostRegister_v2"):
        CudaDriver().register(4096, 100)


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch):
    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_driver, "load_library", missing)
    facts = GroupFacts([RankFacts("m", 1, "p", "GPU-0")] * 2, 0, CUDA, "gloo")
    for kind in ("host_staged", "copy_engine"):
        problem = find_transport_kind(kind).why_not(facts)
        assert problem is not None
        assert "the CUDA driver cannot be loaded" in problem
