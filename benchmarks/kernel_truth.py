"""The truth about a GPU's idle time: every kernel and copy of some seconds, as torch's profiler has seen them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from freescale.trace import read_profiler_traces, union
from freescale.train.accounts.kernel_watch import tear_cupti_down


class Kernels:
    """When anything ran on the device, and for how long it was looked: the profiler, read as `report --trace` does.

    Args:
        device: which one.
        meet: waits for all ranks: profilers take 20 to 250 ms to open.
        then: called as it begins to look.
    """

    def __init__(
        self,
        device: torch.device,
        meet: Callable[[], None] = lambda: None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._device, self._meet, self._then = device, meet, then
        self._profiler: Any = None

    def __enter__(self) -> Kernels:
        tear_cupti_down()
        torch.cuda.synchronize(self._device)
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        )
        self._profiler.start()
        self._meet()
        torch.cuda.synchronize(self._device)
        self._began = time.monotonic()
        self._then()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self._device)
        self.seconds = time.monotonic() - self._began
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            (found,) = read_profiler_traces([path])
        self.num = len(found.activities)
        self.busy = _length((one.start, one.end) for one in found.activities if one.kind != "collective")
        self.compute = _length((one.start, one.end) for one in found.activities if one.kind == "compute")


def _length(intervals: Any) -> float:
    return sum(high - low for low, high in union(intervals))
