"""What a run has measured and all its ranks have agreed on: the cost model and the rank speeds, from a step on.

Loader processes plan steps ahead of the training. A decision therefore names the first step it holds for, and lies
in memory that loader processes share, however they were started, so that every process plans a step with the same
numbers.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.context import assert_spawning
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from freescale.balance.arrays import FloatArray
from freescale.balance.costs.cost_model import COEFFICIENTS, CostModel
from freescale.errors import CheckpointError

# Only the last few matter: a loader is never more than a few steps behind the newest decision.
_KEPT = 16


class Decisions:
    """The agreed cost model and rank speeds of every step. A process is given it when it starts, never later.

    Args:
        model: the cost model of the first steps.
        num_ranks: number of ranks; they begin equally fast.
    """

    def __init__(self, model: CostModel, *, num_ranks: int) -> None:
        width = 1 + len(COEFFICIENTS) + num_ranks
        self._look_at(_nameless_file(8 * (1 + _KEPT * width)))
        self.announce(0, model, np.ones(num_ranks))

    def __getstate__(self) -> Any:
        assert_spawning(self)  # refused but for a process about to start
        return DupFd(self._file)  # where it lies, not what is in it

    def __setstate__(self, shared: Any) -> None:
        self._look_at(shared.detach())

    def __del__(self) -> None:
        if file := self.__dict__.get("_file"):
            os.close(file)

    def _look_at(self, file: int) -> None:
        self._file = file
        numbers = np.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=np.float64)
        self._count, self._table = numbers[:1], numbers[1:].reshape(_KEPT, -1)

    def announce(self, from_step: int, model: CostModel, speeds: Sequence[float] | FloatArray) -> None:
        """Plan with these from a step on that no rank has planned yet; the same call on every rank."""
        row = self._table[int(self._count[0]) % _KEPT]
        row[:] = [from_step, *(getattr(model, name) for name in COEFFICIENTS), *speeds]
        self._count[0] += 1

    def at(self, step: int) -> tuple[CostModel, FloatArray | None]:
        """The model and the speeds (None: all equal) a step is planned with."""
        count = int(self._count[0])
        for number in range(count - 1, max(0, count - _KEPT) - 1, -1):
            row = self._table[number % _KEPT]
            if row[0] <= step or number == max(0, count - _KEPT):
                speeds = row[1 + len(COEFFICIENTS) :].copy()
                return _model(row), None if (speeds == 1).all() else speeds
        raise AssertionError("there is always a first decision")

    def latest(self) -> tuple[CostModel, FloatArray]:
        """The newest decision, whether or not its first step has come."""
        row = self._table[(int(self._count[0]) - 1) % _KEPT]
        return _model(row), row[1 + len(COEFFICIENTS) :].copy()

    def state(self) -> list[list[float]]:
        """All kept decisions, oldest first, for a checkpoint."""
        count = int(self._count[0])
        return [self._table[number % _KEPT].tolist() for number in range(max(0, count - _KEPT), count)]

    def load_state(self, rows: Sequence[Sequence[float]]) -> None:
        """Take the decisions of a checkpoint over; speeds only if it had as many ranks."""
        width = 1 + len(COEFFICIENTS)
        num_ranks = self._table.shape[1] - width
        self._count[0] = 0
        try:
            for row in rows:
                speeds = row[width:] if len(row) == width + num_ranks else np.ones(num_ranks)
                self.announce(int(row[0]), _model(row), speeds)
        except (TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                "the checkpoint's balance decisions cannot be read", got=str(error)
            ) from None
        if not rows:
            self.announce(0, CostModel.default(), np.ones(num_ranks))


def _nameless_file(num_bytes: int) -> int:
    """Memory that processes can share; not in /dev/shm, which is small in many containers and kills who fills it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("decisions")
    else:
        with tempfile.TemporaryFile() as other:
            file = os.dup(other.fileno())
    os.ftruncate(file, num_bytes)
    return file


def _model(row: Sequence[float] | FloatArray) -> CostModel:
    values: dict[str, Any] = dict(zip(COEFFICIENTS, (float(value) for value in row[1:])))
    return CostModel(**values)
