"""Sees a GPU kernel by kernel for a few steps: the torch profiler with nothing but device activity.

The profiler makes launches slower, so steps that are seen have more idle time than others; their kernels take what they
always take. It is only on between two moments at which the run stands still, and taken down again behind them: left
attached, CUPTI costs 10 to 20 % of every later step.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._C._autograd import DeviceType

from freescale.errors import DataError
from freescale.trace import Activity, Clock, Interval, activity_of, read_profiler_traces, union

_ANCHOR_CYCLES = 200_000
"""About 0.1 ms: the host records the moment behind it while it still runs."""

_ANCHOR = "spin_kernel"

_COPIES = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
"""How the names of events begin that are no kernels."""


class Watch(Protocol):
    """Sees when a device works."""

    def start(self) -> None:
        """From here on. Raises where it cannot."""

    def stop(self) -> list[Interval]:
        """When it worked since `start`, in seconds of the host's clock; disjoint, in order. Raises where it cannot."""


class KernelWatch:
    """The kernels and copies of this process on one GPU; kernels that only wait for other ranks are left out.

    Args:
        device: which one.
        clock: whose seconds are told.
    """

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device, self._clock = device, clock
        self._profiler: Any = None
        self._behind: Any = None

    def start(self) -> None:
        """Open the profiler, and let the device do something whose end both clocks know."""
        if torch._C._autograd._profiler_enabled():
            raise DataError("another profiler is on")
        tear_cupti_down()
        self._clock.wait_for_marks()
        # With `acc_events` it would make a Python object of each event, with all it knows of it, while the run waits.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*acc_events")
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
        with torch.cuda.device(self._device):
            torch.cuda._sleep(_ANCHOR_CYCLES)
        self._behind = self._clock.mark()

    def stop(self) -> list[Interval]:
        """Close the profiler and read what it saw."""
        profiler, self._profiler = self._profiler, None
        self._clock.wait_for_marks()
        profiler.stop()
        seen = in_memory(profiler) or in_a_file(profiler)
        anchors = [one for one in seen if _ANCHOR in one.name]
        ended = self._clock.read(self._behind)
        if not anchors or ended is None:
            raise DataError("the profiler saw no kernel of this process")
        offset = ended - anchors[0].end
        return union(
            (one.start + offset, one.end + offset)
            for one in seen
            if one.kind != "collective" and one is not anchors[0]
        )


def in_memory(profiler: Any) -> list[Activity]:
    """What a closed profiler has seen of devices, in order of its start; nothing where this torch does not tell."""
    try:
        results = profiler.profiler.kineto_results
        base_ns = results.trace_start_ns()
        found = [
            activity_of(
                category,
                event.name(),
                (event.start_ns() - base_ns) / 1e9,
                (event.end_ns() - base_ns) / 1e9,
            )
            for event in results.events()
            if (category := _category(event)) is not None
        ]
    except AttributeError:
        return []
    return sorted(filter(None, found), key=lambda one: one.start)


def _category(event: Any) -> str | None:
    """What kind of event it is, in the words of files; None for what no device did."""
    if hasattr(event, "activity_type"):  # torch 2.13; 2.11 has none
        category: str = event.activity_type()
        return category
    if event.device_type() != DeviceType.CUDA or event.is_user_annotation():
        return None
    name = event.name()
    return next((kind for begin, kind in _COPIES.items() if name.startswith(begin)), "kernel")


def in_a_file(profiler: Any) -> list[Activity]:
    """The same by way of a file, which takes several times as long."""
    with tempfile.TemporaryDirectory(prefix="freescale-kernels-") as folder:
        path = Path(folder) / "kernels.json"
        profiler.export_chrome_trace(str(path))
        (trace,) = read_profiler_traces([path])
    return trace.activities if trace.on_device else []


def tear_cupti_down() -> None:
    """Let the profiler detach when it stops; not before CUDA 12.6, where that breaks later CUDA graphs."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if version >= (12, 6):
        os.environ.setdefault("TEARDOWN_CUPTI", "1")
