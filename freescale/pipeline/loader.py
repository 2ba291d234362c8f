"""Batches in step order, planned and read by loader processes while the model computes."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch.utils.data import DataLoader, Dataset

from freescale.balance import BalancedSampler, StepPlan
from freescale.data import Examples, SequenceBatch
from freescale.errors import TrainingError


class PlannedBatch(NamedTuple):
    """This rank's part of one global batch."""

    plan: StepPlan
    batch: SequenceBatch


class _Steps(Dataset[PlannedBatch]):
    """Step number -> batch. A pure function, so any process can make any step."""

    def __init__(self, sampler: BalancedSampler, examples: Examples) -> None:
        self._sampler, self._examples = sampler, examples

    def __getitem__(self, step: int) -> PlannedBatch:
        plan = self._sampler.plan(step)
        return PlannedBatch(plan, self._examples.batch(plan.rows, step=step))


def _outlast_a_request_to_stop(worker: int) -> None:
    """A scheduler sends SIGTERM to every process of a run; this one is needed until the last step, and ends with it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class LoadedBatches:
    """Batches in step order; closed before its end, its loader processes end with it."""

    def __init__(self, loader: DataLoader[PlannedBatch]) -> None:
        self._batches: Iterator[PlannedBatch] = iter(loader)
        _open.add(self)

    def __iter__(self) -> Iterator[PlannedBatch]:
        return self

    def __next__(self) -> PlannedBatch:
        return next(self._batches)

    def close(self) -> None:
        """No batch follows: torch asks the processes of an iterator that nobody holds to end, then terminates them."""
        processes = getattr(self._batches, "_workers", [])
        self._batches = iter(())
        for process in processes:
            process.kill()  # no-op for those that have ended; the others do not listen to being terminated


_open: weakref.WeakSet[LoadedBatches] = weakref.WeakSet()


@atexit.register  # later than torch's and multiprocessing's, so that it comes before them: they wait for ever
def _close_all() -> None:
    for batches in list(_open):
        batches.close()


def load_batches(
    sampler: BalancedSampler,
    examples: Examples,
    *,
    first_step: int,
    num_steps: int,
    workers: int = 0,
    pin: bool = False,
) -> LoadedBatches:
    """Batches of steps first_step .. first_step + num_steps - 1; resuming is starting at another step."""
    loader: DataLoader[PlannedBatch] = DataLoader(
        _Steps(sampler, examples),
        batch_size=None,
        sampler=range(first_step, first_step + num_steps),
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=2 if workers else None,
        worker_init_fn=_outlast_a_request_to_stop,
    )
    return LoadedBatches(loader)


@contextmanager
def naming_lost_workers() -> Iterator[None]:
    """Around steps: a loader process that was killed is told as such; torch raises wherever Python is just then."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise TrainingError(
            "a process that loads batches has ended",
            got=str(error).splitlines()[0],
            next_step="see whether the machine ran out of memory; data.workers=0 loads in the rank itself",
        ) from error
