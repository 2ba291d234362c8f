"""Memory that runs out beside a step, where rows and gradients travel, is told like that of a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from freescale.errors import TrainingError
from freescale.pipeline import ReadyBatch, Schedule
from freescale.train.loop import take_steps
from tests.small_run import make_run


class RunsOut:
    """Batches of a schedule, until there is no room for the rows of the next one."""

    def __init__(self, schedule: Schedule, *, after: int) -> None:
        self._schedule, self._after = schedule, after
        self.update = schedule.update

    def __iter__(self) -> Iterator[ReadyBatch]:
        for number, ready in enumerate(self._schedule):
            if number == self._after:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 52.00 MiB.\nProcess 12 has ..."
                )
            yield ready


def test_rows_that_find_no_room_are_told_with_a_way_on() -> None:
    """A rank of eight on one GPU ended in torch's own words, which name processes and bytes, and no key."""
    run, _ = make_run(("run.steps=6", "run.eval_every=0"))
    with (
        pytest.raises(TrainingError, match="the memory of the GPU was not enough for step 4") as caught,
        run.open_schedule(0) as schedule,
    ):
        take_steps(run, RunsOut(schedule, after=3))  # type: ignore[arg-type]
    assert "on rank 0: CUDA out of memory. Tried to allocate 52.00 MiB." in str(caught.value)
    assert "Process 12" not in str(caught.value)
    assert "optim.accumulate=2 " in str(caught.value)
