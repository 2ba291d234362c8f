"""Transports without SMs on a real GPU: ranks that share it, both engines, random splits, checksums, a killed rank.

Ranks are separate processes on GPU 0 that share it in turns; MPS makes it faster and changes nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from freescale.comm.rings.cuda_driver import CudaDriver
from freescale.comm.rings.rounds import GPU_CUT
from freescale.comm.transport import Transport
from freescale.comm.transports.registry import make_transport
from freescale.comm.world.joining import backend_for
from freescale.comm.world.launcher import QUEUES
from freescale.comm.world.shared_gpu.shares import virtual_gpus_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KINDS = ["host_staged", "copy_engine"]
GPU = torch.device("cuda", 0)


def run_on_gpu(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 100.0) -> list[Any]:
    """fn(rank, *args) in as many processes, all on GPU 0; their results, or their tracebacks as an error."""
    context = multiprocessing.get_context("spawn")
    results: list[Any] = [None] * num_ranks
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        processes = [
            context.Process(target=_rank, args=(fn, rank, num_ranks, folder, answers, args))
            for rank in range(num_ranks)
        ]
        # CUDA reads it when it starts, and importing this module starts it.
        with pytest.MonkeyPatch.context() as patch:
            for name, value in QUEUES.items():
                if not virtual_gpus_here():  # whoever shares it has set what fits the number of ranks
                    patch.setenv(name, value)
            for process in processes:
                process.start()
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                while process.is_alive() and time.monotonic() < deadline:
                    while not answers.empty():
                        rank, ok, value = answers.get()
                        assert ok, value
                        results[rank] = value
                    process.join(0.05)
            while not answers.empty():
                rank, ok, value = answers.get()
                assert ok, value
                results[rank] = value
            assert not any(process.is_alive() for process in processes), "a rank did not finish"
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return results


def _rank(fn: Callable[..., Any], rank: int, num_ranks: int, folder: str, answers: Any, args: Any) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    try:
        torch.cuda.set_device(GPU)
        backend = backend_for(GPU) if virtual_gpus_here() else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
        )
        answers.put((rank, True, fn(rank, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, False, f"rank {rank}:\n{traceback.format_exc()}"))
        os._exit(1)


def rows_for(number: int, source: int, target: int, count: int) -> torch.Tensor:
    """What a rank sends to another: numbers that name the exchange, both ranks and the place."""
    start = 1_000_003 * number + 10_007 * source + 101 * target
    return (torch.arange(start, start + 16 * count, device=GPU) % 1_000_000_007).view(count, 16)


def exchange_many(rank: int, num_ranks: int, kind: str, num_exchanges: int, most: int) -> tuple[int, int]:
    """Random uneven splits with several exchanges in flight, compute beside them; bytes moved, slot size."""
    transport: Any = make_transport(dist.group.WORLD, device=GPU, kind=kind, timeout_s=60)
    assert transport.sm_free is (kind == "host_staged")
    matrix = torch.randn(512, 512, device=GPU)
    rng, on_the_way, moved = random.Random(11), [], 0
    for number in range(num_exchanges):
        limit = rng.choice([0, 1, 50, most])
        counts = [
            [rng.choice([0, rng.randint(0, limit)]) for _ in range(num_ranks)] for _ in range(num_ranks)
        ]
        send, receive = counts[rank], [row[rank] for row in counts]
        rows = torch.cat([rows_for(number, rank, target, send[target]) for target in range(num_ranks)])
        pending = transport.start(rows, send=send, receive=receive)
        del rows  # its memory must not be given away before it has left
        matrix = (matrix @ matrix).clamp(-1, 1)
        on_the_way.append((number, receive, pending))
        moved += 128 * sum(receive)
        rng.shuffle(on_the_way)
        while len(on_the_way) > 3 or (on_the_way and rng.random() < 0.5):
            check(rank, *on_the_way.pop())
    while on_the_way:
        check(rank, *on_the_way.pop())
    torch.cuda.synchronize()
    return moved, transport.slot_bytes


def check(rank: int, number: int, receive: list[int], pending: Any) -> None:
    wanted = torch.cat([rows_for(number, source, rank, count) for source, count in enumerate(receive)])
    assert torch.equal(pending.wait(), wanted), f"exchange {number}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_ranks", "most"), [(2, 200), (4, 3000)])
def test_rows_arrive_whatever_the_splits(kind: str, num_ranks: int, most: int) -> None:
    run_on_gpu(exchange_many, num_ranks, num_ranks, kind, 150, most)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_grow_with_large_messages(kind: str) -> None:
    for moved, slot_bytes in run_on_gpu(exchange_many, 2, 2, kind, 70, 60_000):
        assert moved > 32 << 20  # many times what the first slots hold
        assert slot_bytes == GPU_CUT.least


def lose_one(rank: int, kind: str, folder: str) -> None:
    """Rank 1 is killed; the others' streams must not wait for ever, and the error must name it."""
    transport: Transport = make_transport(dist.group.WORLD, device=GPU, kind=kind, timeout_s=60)
    go_on(transport)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    text = ""
    try:
        for _ in range(3):
            go_on(transport)
    except ConnectionError as error:
        text = str(error)
    Path(folder, f"{rank}.txt").write_text(f"{time.monotonic() - began:.1f} {text}")
    os._exit(0)  # a barrier would wait for the killed rank


def go_on(transport: Transport) -> None:
    transport.start(torch.ones(9000, device=GPU), send=[3000] * 3, receive=[3000] * 3).wait()
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_is_named_and_nothing_is_left(kind: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    run_on_gpu(lose_one, 3, kind, str(tmp_path))
    for rank in (0, 2):
        text = (tmp_path / f"{rank}.txt").read_text()
        assert "ranks [1] have ended" in text, text
        assert float(text.split()[0]) < 30
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "freescale" in name]
    # A new start finds nothing in its way.
    run_on_gpu(exchange_many, 2, 2, kind, 10, 50)


def no_kernel(rank: int) -> list[str]:
    """Names of kernels the profiler sees in an exchange of rows that travel; copies inside the GPU are kernels."""
    transport: Any = make_transport(dist.group.WORLD, device=GPU, kind="host_staged", timeout_s=60)
    rows = torch.ones(100_000, 16, device=GPU)
    counts = [0, 100_000] if rank == 0 else [100_000, 0]
    transport.start(rows, send=counts, receive=counts).wait()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pending = transport.start(rows, send=counts, receive=counts)
        got = pending.wait()
        torch.cuda.synchronize()
    events = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert float(got.sum()) == 100_000 * 16
    assert any("Memcpy" in name for name in events), events
    beside = ("Memcpy DtoH", "Memcpy HtoD", "Event", "Sync")
    return [name for name in events if not any(words in name for words in beside)]


def test_a_host_staged_exchange_runs_no_kernel() -> None:
    assert run_on_gpu(no_kernel, 2) == [[], []]


def beside_waits(rank: int) -> list[str]:
    """What does not get through while as many streams as three transports have wait for a word."""
    driver, word = CudaDriver(), torch.zeros(1, dtype=torch.int32, pin_memory=True)
    driver.use(0)
    waiting = [torch.cuda.Stream(GPU, priority=-1) for _ in range(6)]
    beside = {"compute": torch.cuda.current_stream(), "side": torch.cuda.Stream(GPU)}
    beside |= {f"another transport {n}": torch.cuda.Stream(GPU, priority=-1) for n in range(2)}
    values = torch.zeros(64, device=GPU)
    for stream in (*beside.values(), *waiting):  # every kernel is loaded, every stream has its queue
        with torch.cuda.stream(stream):
            values += 1
        torch.cuda.synchronize()
    for stream in waiting:
        driver.flags(stream.cuda_stream, wait=[(word.data_ptr(), 1)])
    events = {}
    for name, stream in beside.items():
        with torch.cuda.stream(stream):
            values += 1
            events[name] = stream.record_event()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and not all(event.query() for event in events.values()):
        time.sleep(0.01)
    stuck = [name for name, event in events.items() if not event.query()]
    early = [f"waiting {n}" for n, stream in enumerate(waiting) if stream.query()]
    word.fill_(1)
    torch.cuda.synchronize()
    return stuck + early


def test_streams_that_wait_do_not_stop_those_that_compute() -> None:
    assert run_on_gpu(beside_waits, 1) == [[]]


def sum_gradients(rank: int) -> list[float]:
    """What dense gradients and small sums need of a gloo group with tensors of a shared GPU."""
    values = torch.full((1000,), float(rank + 1), device=GPU)
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    work.get_future().wait()
    torch.cuda.synchronize()
    return values[:2].tolist()


def test_a_gloo_group_adds_up_tensors_of_a_shared_gpu() -> None:
    assert run_on_gpu(sum_gradients, 2) == [[3.0, 3.0]] * 2


def prioritized_bits(rank: int, kind: str) -> bool:
    """Plain and prioritized training over the transport: the same bits."""
    from freescale.comm.traffic.channels import open_channels
    from freescale.embedding import Adam
    from freescale.embedding.sharding.plan import TableSpec
    from freescale.embedding.sharding.sharded import ShardedEmbedding
    from freescale.pipeline.prioritized.pipeline import PrioritizedPipeline

    spec = TableSpec(name="item", num_rows=5000, dim=32, optimizer=Adam(), init_std=1.0)
    ends = []
    for prioritized in (False, True):
        transport = make_transport(dist.group.WORLD, device=GPU, kind=kind, timeout_s=60)
        tables = ShardedEmbedding([spec], group=dist.group.WORLD, device=GPU, transport=transport)
        draws = [torch.Generator().manual_seed(100 * rank + step) for step in range(25)]
        batches = [(5000 * torch.rand(2000, generator=draw) ** 4).long() for draw in draws]
        with PrioritizedPipeline(
            batches,
            embedding=tables,
            rows_of=lambda rows: {"item": rows},
            prioritized=lambda step, way=prioritized: way,  # type: ignore[misc]
            channels=open_channels(dist.group.WORLD, device=GPU, kind=kind, timeout_s=60),
        ) as pipeline:
            for ready in pipeline:
                vectors = ready.vectors["item"]
                weight = torch.cos(torch.arange(len(vectors), device=GPU))[:, None]
                (weight * vectors.square() + vectors).sum().backward()
                pipeline.update(ready, lr=0.1 / (1 + ready.step))
        torch.cuda.synchronize()
        ends.append(tables.tables["item"].weight.cpu())
    return torch.equal(*ends)


@pytest.mark.parametrize("kind", KINDS)
def test_prioritized_training_has_the_bits_of_the_plain_path(kind: str) -> None:
    assert run_on_gpu(prioritized_bits, 2, kind) == [True, True]


def steps_without_waiting(rank: int, folder: str, changes: tuple[str, ...]) -> int:
    """Whole training steps; a call that makes the host wait for the GPU is an error."""
    from freescale.comm.world.ranks import Ranks
    from freescale.recipe import build_run, build_source, load_config
    from freescale.train.log.events import Progress
    from freescale.train.loop import reports_of, timed_batches
    from tests.small_run import SMALL

    keys = (
        "run.device=cuda",
        "run.steps=16",
        "run.log_every=100",
        "embedding.replicate_below_mb=0",
        "pipeline.decide_every=null",
        "balance.refit_every=null",
    )
    config = load_config(None, [*SMALL, *keys, *changes, f"run.out={folder}"])
    world = dist.group.WORLD
    ranks = Ranks(rank=rank, num_ranks=2, device=GPU, group=world, control=world, background=dist.new_group())
    run = build_run(config, build_source(config), ranks, Progress())
    reports = reports_of(run)
    with run.open_schedule(0) as schedule:
        run.accounts.begin(1)
        for ready in timed_batches(schedule, 0):
            torch.cuda.set_sync_debug_mode("error" if 5 <= ready.plan.step < 12 else "default")
            result = run.train_step.run(ready, schedule)
            reports.add(ready, result, seconds=run.accounts.end_step())
        reports.flush()
    return reports.lag


@pytest.mark.parametrize("transport", ["copy_engine", "host_staged"])
@pytest.mark.parametrize(
    "change",
    [
        (),
        ("pipeline.prioritized=false",),
        ("pipeline.postpone=on",),
        ("optim.accumulate=2", "optim.clip_norm=0.5"),
        ("ffn.kind=moe", "ffn.hidden=16", "moe.experts=4", "moe.top_k=2"),
    ],
    ids=str,
)
def test_the_host_never_waits_for_the_gpu_in_a_step(
    tmp_path: Path, transport: str, change: tuple[str, ...]
) -> None:
    changes = (f"comm.transport={transport}", *change)
    assert run_on_gpu(steps_without_waiting, 2, str(tmp_path), changes) == [1, 1]
