"""Times of single pieces of work: of a GPU by the clock, of a CPU rank by the core's time it took.

A CPU rank computes in this process alone, so the processor time of the process is what the work costs, also while
other programs keep the machine busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Stopwatch:
    """Runs a piece of work and remembers how long it took.

    Args:
        device: waited for before and after.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now = time.perf_counter if device.type == "cuda" else time.process_time
        self.ms = 0.0

    def run(self, work: Callable[[], T]) -> T:
        """Do it; `ms` is its time afterwards."""
        self.settle()
        began = self._now()
        result = work()
        self.settle()
        self.ms = 1000 * (self._now() - began)
        return result

    def settle(self) -> None:
        """Until the device has nothing left to do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
