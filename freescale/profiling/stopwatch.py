"""Times of single pieces of work: of a GPU what it worked, of a CPU rank the core's time it took.

A GPU is kept waiting until the host has queued the work, or most of it: in training, too, the host is ahead. A CPU rank
computes in this process alone, so the processor time of the process is what the work costs, also while other programs
keep the machine busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

HEAD_START_CYCLES = 40_000_000
"""About 20 ms of an H200: the host queues the backward of eight layers in less."""


class Stopwatch:
    """Runs a piece of work and remembers how long it took.

    Args:
        device: waited for before and after.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ms = 0.0

    def run(self, work: Callable[[], T]) -> T:
        """Do it; `ms` is its time afterwards."""
        if self._device.type == "cuda":
            return self._run_on_gpu(work)
        began = time.process_time()
        result = work()
        self.ms = 1000 * (time.process_time() - began)
        return result

    def _run_on_gpu(self, work: Callable[[], T]) -> T:
        torch.cuda.synchronize(self._device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        began.record()
        result = work()
        ended.record()
        torch.cuda.synchronize(self._device)
        self.ms = float(began.elapsed_time(ended))
        return result
