"""Batches from loader processes; one that is killed is told as the user's to mend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


BUSY = """
import sys, time
import torch.utils.data._utils as torch_loaders
from freescale.pipeline.loader import load_batches

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
