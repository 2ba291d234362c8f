"""A rank that dies in any stage ends the others at once, and no delay anywhere makes them wait for ever."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from freescale.errors import DataError
from freescale.pipeline.prioritized import pipeline as prioritized
from freescale.pipeline.prioritized import row_moves, urgent_chain
from freescale.trace import stages
from tests.effort import slow
from tests.pipeline.prioritized.test_pipeline import specs_of
from tests.pipeline.two_paths import (
    channels_of,
    make_embedding,
    random_batches,
    state_bits,
    train_plainly,
    train_prioritized,
)
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.timed

STAGES = [
    "load",
    "map ids",
    "exchange ids",
    "split into OL and NOL",
    "fetch NOL rows",
    "wait for NOL rows",
    "fetch OL rows",
    "wait for the split",
    "send OL gradients",
    "apply OL gradients",
    "send NOL gradients",
    "apply NOL gradients",
    "flush parked gradients",
]


def hook_stages(act: Callable[[str, int], None]) -> None:
    """Call act(stage, step) at the beginning of every stage of the schedule, in the thread that does it."""

    @contextlib.contextmanager
    def stage(name: str, *, step: int, **options: str) -> Iterator[None]:
        act(name, step)
        with stages.stage(name, step=step, **options):
            yield

    prioritized.stage = row_moves.stage = urgent_chain.stage = stage


def train(rank: int, num_ranks: int, sockets: bool, num_steps: int = 12, beside: bool = False) -> None:
    specs = specs_of("adam")
    batches = random_batches(8, specs, num_steps, rank, num_ranks)
    embedding = make_embedding(specs, sockets=sockets)
    train_prioritized(
        embedding,
        batches,
        channels=channels_of(sockets=sockets),
        beside=beside,
        after_step=lambda step: embedding.wait_for_updates(),
    )


def die_in(rank: int, folder: str, where: str, sockets: bool, beside: bool, pipe: object) -> None:
    """Rank 1 kills itself; rank 0 tells how it ended, and when."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def act(name: str, step: int) -> None:
        if rank == 1 and name == where and step >= 4:
            os.kill(os.getpid(), signal.SIGKILL)

    hook_stages(act)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        train(rank, 2, sockets, beside=beside)
        pipe.send("went on to the end")
    except BaseException as error:
        pipe.send(f"{type(error).__name__} in stage '{stages.current_stage()[0]}'")
    os._exit(1)


@pytest.mark.parametrize(
    ("where", "sockets", "beside"),
    [
        *((stage, n % 2 == 0, False) for n, stage in enumerate(STAGES)),
        *(slow(stage, n % 2 == 1, False) for n, stage in enumerate(STAGES)),
        ("send OL gradients", True, True),
        ("wait for OL rows", False, True),
        slow("apply OL gradients", True, True),
        slow("fetch OL rows", False, True),
    ],
)
def test_a_rank_that_dies_in_any_stage_ends_the_others(where, sockets, beside):
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        receive, send = context.Pipe(duplex=False)
        options = (folder, where, sockets, beside, send)
        ranks = [context.Process(target=die_in, args=(r, *options)) for r in range(2)]
        for process in ranks:
            process.start()
        send.close()
        try:
            ranks[1].join(30)
            assert ranks[1].exitcode == -signal.SIGKILL, "the stage was never reached"
            died = time.monotonic()
            assert receive.poll(15), "rank 0 waits for a rank that is gone"
            said = receive.recv()
            assert time.monotonic() - died < 30
            ranks[0].join(10)
            assert ranks[0].exitcode == 1
        finally:
            for process in ranks:
                process.kill()
                process.join()
    assert said.startswith(("ConnectionError", "ConnectionResetError", "RuntimeError", "DistBackendError")), (
        said
    )


def fail_while_mapping(rank: int) -> str:
    """An error on the communication thread comes out where the rank next waits, with its stage."""
    specs = specs_of("sgd")
    batches = random_batches(1, specs, 20, rank, 1)
    batches[9]["item"] = torch.tensor([3, 61])
    with pytest.raises(DataError, match="row 61 lies outside table 'item'"):
        train_prioritized(make_embedding(specs), batches, channels=channels_of(sockets=False))
    stage, step = stages.current_stage()
    return f"{stage} {step}"


def test_an_error_of_the_communication_thread_is_told_with_its_stage_and_step():
    """One rank of a group: its tables are sharded over one rank, so everything runs and nobody else waits."""
    from freescale.embedding.sharding import plan

    real = plan.plan_tables

    def sharded(specs, *, num_ranks, replicate_below_mb=0.0):
        return [plan.TablePlan(spec=s, num_ranks=1, replicated=False) for s in specs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("freescale.embedding.sharding.sharded.plan_tables", sharded)
        assert run_on_ranks(fail_while_mapping, 1) == ["exchange ids 10"]
    assert plan.plan_tables is real


def with_delays(rank: int, num_ranks: int, sockets: bool, num_delays: int) -> int:
    """Every stage of every rank may begin late; the bits must not care. Returns the delays injected."""
    specs, count = specs_of("adam"), 0
    rng = random.Random(100 + rank)

    def act(name: str, step: int) -> None:
        nonlocal count
        if rng.random() < 0.5:
            count += 1
            time.sleep(rng.choice([0, 0.0005, 0.001, 0.004]))

    channels = channels_of(sockets=sockets)
    hook_stages(act)
    num_steps, seed = 20, 0
    while True:
        batches = random_batches(seed, specs, num_steps, rank, num_ranks)
        plain, ours = make_embedding(specs, sockets=sockets), make_embedding(specs, sockets=sockets)
        expected = train_plainly(plain, batches)
        options = {"channels": channels, "check": seed % 2 == 0, "beside": seed % 3 != 2}
        losses, _ = train_prioritized(ours, batches, **options)
        assert losses == expected
        assert state_bits(ours) == state_bits(plain)
        seed += 1
        enough = torch.tensor([int(count >= num_delays)])
        dist.all_reduce(enough)
        if int(enough) == num_ranks:
            return count


@pytest.mark.parametrize("sockets", [True, False])
def test_delays_between_stages_change_nothing(sockets):
    assert min(run_on_ranks(with_delays, 2, 2, sockets, 120, timeout=100)) >= 120


@pytest.mark.slow
@pytest.mark.parametrize("sockets", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_thousand_delays_between_stages_change_nothing(num_ranks, sockets):
    counts = run_on_ranks(with_delays, num_ranks, num_ranks, sockets, 1000, timeout=600)
    assert min(counts) >= 1000
