"""Batches in step order, planned and read by loader processes while the model computes."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from freescale.balance import BalancedSampler, StepPlan
from freescale.data import Examples, SequenceBatch
from freescale.errors import FreeScaleError, TrainingError

_PREFETCH = 2
_MOST_UNTAKEN = 2 * _PREFETCH + 4
_LOST = "DataLoader worker"
_PR_SET_PDEATHSIG = 1
_given: deque[int] = deque()
"""Of a loader process: descriptors of its latest batches."""


class PlannedBatch(NamedTuple):
    """This rank's part of one global batch."""

    plan: StepPlan
    batch: SequenceBatch


class _Steps(Dataset[PlannedBatch | FreeScaleError]):
    """Step number -> batch, or what is wrong with it. A pure function, so any process can make any step.

    torch would make the text of a traceback out of an error that was raised in a loader process.
    """

    def __init__(self, sampler: BalancedSampler, examples: Examples) -> None:
        self._sampler, self._examples = sampler, examples

    def __getitem__(self, step: int) -> PlannedBatch | FreeScaleError:
        try:
            plan = self._sampler.plan(step)
            return PlannedBatch(plan, self._examples.batch(plan.rows, step=step))
        except FreeScaleError as error:
            return error


class _Packed:
    """A batch on its way out of a loader process: in memory that has no name, opened by way of the process that has it.

    torch would send every tensor through /dev/shm and its handle through a socket in TMPDIR. A container's small
    /dev/shm then ends the run, and a TMPDIR that somebody has cleaned lets it wait for ever.
    """

    def __init__(self, planned: PlannedBatch) -> None:
        batch = planned.batch
        parts = (batch.tokens, batch.samples, batch.items)
        self._plan = planned.plan
        counts = batch.counts()
        self._counts = list(counts)
        named = [
            ("", batch.offsets),
            *counts.items(),
            *(feature for part in parts for feature in part.items()),
        ]
        values = [tensor.contiguous() for _, tensor in named]
        self._layout = [(name, tensor.dtype, tensor.shape) for (name, _), tensor in zip(named, values)]
        self._sizes = [len(part) for part in parts]
        pieces = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in values]
        self._content: Any = _put(pieces)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._content = _take(self._content)

    def open(self) -> PlannedBatch:
        """The batch it was."""
        tensors, at = [], 0
        for name, dtype, shape in self._layout:
            count = shape.numel()
            tensor = torch.frombuffer(self._content, dtype=dtype, count=count, offset=at) if count else None
            tensors.append(
                (name, torch.empty(shape, dtype=dtype) if tensor is None else tensor.reshape(shape))
            )
            at += _aligned(count * dtype.itemsize)
        (_, offsets), *features = tensors
        counts: dict[str, Any] = {name: features.pop(0)[1] for name in self._counts}
        left = iter(features)
        tokens, samples, items = (dict(itertools.islice(left, size)) for size in self._sizes)
        batch = SequenceBatch(offsets, tokens, samples, items=items, **counts)
        return PlannedBatch(self._plan, batch)

    def pin_memory(self) -> PlannedBatch:
        """The name torch's DataLoader looks for, in the thread that waits for batches."""
        plan, batch = self.open()
        return PlannedBatch(plan, batch.pin())


def _put(pieces: Sequence[np.ndarray[Any, np.dtype[np.uint8]]]) -> tuple[int, int, int]:
    """Bytes in a file of memory: process, descriptor, size. Later batches close it: it has been taken by then."""
    size = sum(_aligned(len(piece)) for piece in pieces)
    file = os.memfd_create("batch")
    os.ftruncate(file, max(size, 1))
    at = 0
    for piece in pieces:
        view = piece.data
        done = 0
        while done < len(view):
            done += os.pwrite(file, view[done:], at + done)
        at += _aligned(len(piece))
    _given.append(file)
    if len(_given) > _MOST_UNTAKEN:
        os.close(_given.popleft())
    return os.getpid(), file, size


def _take(place: tuple[int, int, int]) -> mmap.mmap:
    process, file, size = place
    try:
        mine = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    except FileNotFoundError:
        raise RuntimeError(f"{_LOST} (pid {process}) has ended, and a batch with it") from None
    try:
        return mmap.mmap(mine, max(size, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(mine)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


_Loaded = PlannedBatch | _Packed | FreeScaleError


def _pack(planned: PlannedBatch | FreeScaleError) -> _Loaded:
    return planned if isinstance(planned, FreeScaleError) else _Packed(planned)


def _unchanged(planned: PlannedBatch | FreeScaleError) -> _Loaded:
    return planned


@contextlib.contextmanager
def forks_without_collections() -> Iterator[None]:
    """Inside, the collector of this process, and of those forked from it, does nothing (`leave_to_the_rank`)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def leave_to_the_rank() -> None:
    """In a new loader process: what the rank has left for the collector stays, and what comes after it is collected.

    It may be memory of a GPU, which only the rank can give back.
    """
    gc.freeze()
    gc.enable()


def _begin(worker: int) -> None:
    """What a loader process of torch does first."""
    leave_to_the_rank()
    live_as_long_as_the_rank(worker)


def live_as_long_as_the_rank(worker: int) -> None:
    """In a loader process: no shorter than the rank that needs it, and no longer.

    A scheduler sends SIGTERM to every process of a run; this one is needed until the last step. When the rank ends,
    however it ends, the kernel ends this one; torch would look every five seconds whether it is still there.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)  # it has ended meanwhile


class LoadedBatches:
    """Batches in step order; closed before its end, its loader processes end with it."""

    def __init__(self, loader: DataLoader[_Loaded]) -> None:
        with forks_without_collections():
            self._batches: Iterator[_Loaded] = iter(loader)
        _open.add(self)

    def __iter__(self) -> Iterator[PlannedBatch]:
        return self

    def __next__(self) -> PlannedBatch:
        batch = next(self._batches)
        if isinstance(batch, FreeScaleError):
            raise batch
        return batch.open() if isinstance(batch, _Packed) else batch

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
    collate: Callable[..., _Loaded] = _pack if workers else _unchanged
    loader: DataLoader[_Loaded] = DataLoader(
        _Steps(sampler, examples),
        batch_size=None,
        sampler=range(first_step, first_step + num_steps),
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=_PREFETCH if workers else None,
        collate_fn=collate,
        worker_init_fn=_begin,
    )
    return LoadedBatches(loader)


@contextlib.contextmanager
def naming_lost_workers() -> Iterator[None]:
    """Around steps: a loader process that was killed is told as such; torch raises wherever Python is just then."""
    try:
        try:
            yield
        except BaseException:
            _hear_no_more_of_workers()
            raise
    except RuntimeError as error:
        if not str(error).startswith(_LOST):
            raise
        raise TrainingError(
            "a process that loads batches has ended",
            got=str(error).splitlines()[0],
            next_step="see whether the machine ran out of memory; data.workers=0 loads in the rank itself",
        ) from error


def _hear_no_more_of_workers() -> None:
    """On the way out of an error: torch's handler would raise another one into whatever tells the first.

    A loader made later sets the handler again.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal_handling._SIGCHLD_handler_set = False
