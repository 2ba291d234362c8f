"""Batches from loader processes; one that is killed is told as the user's to mend."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from freescale.balance import StepPlan
from freescale.data import SequenceBatch
from freescale.errors import DataError, TrainingError
from freescale.pipeline.loading.loader import load_batches, naming_lost_workers

pytestmark = pytest.mark.timed


class Killed:
    """A sampler whose plans cost the process that asks its life."""

    def plan(self, step: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_loader_process_is_named():
    ended = pytest.raises(TrainingError, match="a process that loads batches has ended")
    with ended as caught, naming_lost_workers():
        next(load_batches(Killed(), None, first_step=0, num_steps=3, workers=1))
    assert "data.workers=0" in str(caught.value)


class Collecting:
    """A sampler whose plans come with a full collection."""

    def plan(self, step: int) -> None:
        gc.collect()
        raise DataError("planned, and nothing was touched")


def test_what_the_rank_left_for_the_collector_is_not_touched_by_loader_processes():
    """Memory of a GPU, say. Processes that write whole parcels have kept to it for long, those of torch had not."""

    class Foreign:
        def __del__(self) -> None:
            if os.getpid() != rank:
                os._exit(7)

    rank = os.getpid()
    gc.disable()
    try:
        left = Foreign()
        left.itself = left
        del left
        batches = load_batches(Collecting(), None, first_step=0, num_steps=2, workers=1)
        with contextlib.closing(batches), pytest.raises(DataError, match="nothing was touched"):
            next(batches)
        assert not gc.isenabled(), "as it was before"
    finally:
        gc.enable()
        gc.collect()


class Damaged:
    """A sampler that finds the data other than it was."""

    def plan(self, step: int) -> None:
        raise DataError("shard 3 is not as it was written", got=f"step {step}", next_step="prepare it again")


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_wrong_with_the_data_is_told_without_a_traceback(workers):
    batches = load_batches(Damaged(), None, first_step=5, num_steps=3, workers=workers)
    with contextlib.closing(batches), pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value).splitlines()[0] == "shard 3 is not as it was written"
    assert caught.value.got == "step 5"
    assert "Traceback" not in str(caught.value)


BUSY = """
import sys, time
import torch.utils.data._utils as torch_loaders
from freescale.pipeline.loading.loader import load_batches

torch_loaders.MP_STATUS_CHECK_INTERVAL = 0.2  # instead of 5 s, twice

class Busy:
    def plan(self, step):
        time.sleep(60)

batches = load_batches(Busy(), None, first_step=0, num_steps=3, workers=1)
time.sleep(0.5)  # it has begun, and does not listen to being terminated
sys.exit(3)
"""


def test_a_program_ends_whatever_its_loader_processes_do():
    ended = subprocess.run([sys.executable, "-c", BUSY], timeout=30, check=False)
    assert ended.returncode == 3


class Rows:
    """A sampler that asks for its step's number."""

    def plan(self, step: int) -> StepPlan:
        return StepPlan(step, 0, np.array([step]), 1, 3, 1.0, 1.0, "")


class AnyBatch:
    """Features of several kinds and shapes, none of them a copy of another."""

    def batch(self, rows: np.ndarray, *, step: int) -> SequenceBatch:
        return SequenceBatch(
            torch.tensor([0, 2, 3]),
            {
                "item": torch.tensor([2**62, -1, step]),
                "score": torch.rand(3, 2).bfloat16()[:, ::2] * 0 + step,
            },
            {"row": torch.tensor([True, False]), "none": torch.empty(2, 0)},
            items={"genre": torch.tensor([[1, 2], [step, 4], [5, 6]]), "new.none": torch.tensor([True] * 3)},
        )


def test_batches_need_no_temporary_files_and_no_shared_memory(monkeypatch):
    """A cleaned TMPDIR let a run wait for ever; a container's small /dev/shm ended it."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", "/nowhere")
    given = list(load_batches(Rows(), AnyBatch(), first_step=4, num_steps=3, workers=2))
    assert [batch.plan.step for batch in given] == [4, 5, 6]
    for step, (plan, batch) in enumerate(given, start=4):
        expected = AnyBatch().batch(plan.rows, step=step)
        for kind in ("tokens", "samples", "items"):
            there, here = getattr(expected, kind), getattr(batch, kind)
            assert there.keys() == here.keys()
            assert all(torch.equal(there[name], here[name]) for name in there)
            assert all(there[name].dtype == here[name].dtype for name in there)
            assert not any(values.is_shared() for values in here.values())


def test_a_loader_process_that_ends_while_an_error_is_told_does_not_raise_into_it(request):
    batches = load_batches(Rows(), AnyBatch(), first_step=0, num_steps=9, workers=1)
    next(batches)
    (worker,) = batches._batches._workers
    handler = signal.getsignal(signal.SIGCHLD)
    assert callable(handler), "torch hears of its processes by this signal"
    request.addfinalizer(lambda: signal.signal(signal.SIGCHLD, handler))
    with pytest.raises(TrainingError, match="a process that loads batches has ended"), naming_lost_workers():
        raise RuntimeError("DataLoader worker (pid 1) has ended, and a batch with it")
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.5)  # where torch's handler would raise
    batches.close()


ORPHAN = """
import os, time
from freescale.pipeline.loading.loader import load_batches

class Busy:
    def plan(self, step):
        time.sleep(60)

batches = load_batches(Busy(), None, first_step=0, num_steps=3, workers=1)
print(batches._batches._workers[0].pid, flush=True)
time.sleep(1)  # it has begun
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of others does not end children")
def test_loader_processes_end_with_the_rank_however_it_ends():
    ended = subprocess.run([sys.executable, "-c", ORPHAN], timeout=60, check=True, stdout=subprocess.PIPE)
    loader, deadline = int(ended.stdout), time.monotonic() + 20
    while os.path.exists(f"/proc/{loader}"):
        assert time.monotonic() < deadline, "it lives on without its rank"
        time.sleep(0.05)
