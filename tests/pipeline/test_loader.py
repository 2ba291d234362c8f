"""Batches from loader processes; one that is killed is told as the user's to mend."""

from __future__ import annotations

import os
import signal

import pytest

from freescale.errors import TrainingError
from freescale.pipeline.loader import load_batches, naming_lost_workers


class Killed:
    """A sampler whose plans cost the process that asks its life."""

    def plan(self, step: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_loader_process_is_named():
    ended = pytest.raises(TrainingError, match="a process that loads batches has ended")
    with ended as caught, naming_lost_workers():
        next(load_batches(Killed(), None, first_step=0, num_steps=3, workers=1))
    assert "data.workers=0" in str(caught.value)
