"""Plans that are used at once, replayed as CUDA graphs.

A sort of 100,000 keys is a dozen launches, which take the host 60 to 110 us and the GPU less. Replayed they take the
host 15 us. The price is memory that is written over by the next plan of that size: so plans for later are made by
`plan.make_plan`, and those here are lent for one use, in the order of the stream.

Sizes lie up to an eighth apart, with keys behind all others as padding; a size is recorded when it is met again.
"""

# mypy: ignore-errors

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from freescale.kernels.rows.plan import RowPlan
from freescale.kernels.rows.triton.plan import make_plan, pad_keys
from freescale.kernels.runtime import finish_graph

MOST_KEYS = 1 << 18
"""More keys keep the GPU busy for longer than the host takes for their launches."""

FEWEST_KEYS = 1 << 12
_MOST_SIZES = 16
_MEETINGS = 3
_FAILED = "failed"

_lock = threading.Lock()
_sizes: dict[tuple[object, ...], RecordedPlan | int | str] = {}
"""By stream, type and capacity: a recording, how often it was asked for, or that it cannot be had."""


class RecordedPlan:
    """The plan of up to so many keys.

    Args:
        capacity: this many.
        dtype: of the keys.
        device: where they are.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._keys = torch.zeros(capacity, dtype=dtype, device=device)
        self._real = torch.zeros(1, dtype=torch.int32, device=device)
        make_plan(self._keys, real=self._real)  # kernels are compiled and loaded
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            # `torch.cuda.graph` would wait for the device and give its free memory back.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._plan = make_plan(self._keys, real=self._real)
            finally:
                self._graph.capture_end()
        finish_graph(self._graph)
        self._lent = replace(self._plan, keys=None)

    def of(self, keys: Tensor) -> RowPlan:
        """The plan of these keys, until the next one is made."""
        pad_keys(keys, self._keys, self._real)
        self._graph.replay()
        if self._lent.num_values != len(keys):
            self._lent = replace(self._plan, order=self._plan.order[: len(keys)], keys=None)
        return self._lent


def use_plan(keys: Tensor, use: Callable[[RowPlan], None]) -> None:
    """Let `use` queue work with the plan of these keys; the plan means nothing afterwards."""
    if not _can_replay(keys):
        use(make_plan(keys))
        return
    capacity = capacity_of(len(keys))
    stream = torch._C._cuda_getCurrentRawStream(keys.device.index)
    name = (keys.device.index, stream, keys.dtype, capacity)
    # Other threads may use this stream, too: nobody may come in between the plan and its use.
    with _lock:
        found = _sizes.get(name, 0)
        if isinstance(found, int):
            found = _sizes[name] = _met(found + 1, capacity, keys)
        if isinstance(found, RecordedPlan):
            use(found.of(keys))
            return
    use(make_plan(keys))


def capacity_of(num_keys: int) -> int:
    """The size that so many keys are padded to: 8 to 15 times a power of two."""
    step = max(FEWEST_KEYS, 1 << (num_keys - 1).bit_length()) // 16
    return max(FEWEST_KEYS, -(-num_keys // step) * step)


def _can_replay(keys: Tensor) -> bool:
    inside = keys.is_cuda and 0 < len(keys) <= MOST_KEYS
    return inside and not torch.cuda.is_current_stream_capturing()


def _met(times: int, capacity: int, keys: Tensor) -> RecordedPlan | int | str:
    """A recording, where this size was asked for often enough and there are not too many."""
    if times < _MEETINGS or sum(isinstance(each, RecordedPlan) for each in _sizes.values()) >= _MOST_SIZES:
        return times
    try:
        return RecordedPlan(capacity, keys.dtype, keys.device)
    except RuntimeError as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"sorts of rows are started one by one, 0.1 ms a step: they cannot be recorded ({first})",
            stacklevel=2,
        )
        return _FAILED
