"""Plans that are used at once, replayed as CUDA graphs.

A sort of 100,000 keys is a dozen launches, which take the host longer than the GPU. Replayed they are one. The price is
memory that is written over by the next plan of that size: so plans for later are made by `plan.make_plan`, and those
here are lent for one use, in the order of the stream.

Sizes lie up to an eighth apart, with keys behind all others as padding; a size is recorded when it is met for the third
time. Recordings of one stream share what they compute in. While one is made, a millisecond, torch lets no other thread
draw random numbers on that GPU; who does so beside updates turns it off (`ShardedEmbedding(replay_sorts=False)`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from freescale.kernels.rows.plan import RowPlan
from freescale.kernels.runtime import finish_graph, kernels_of, stream_address

MOST_KEYS = 1 << 18
"""More keys keep the GPU busy for longer than the host takes for their launches."""

FEWEST_KEYS = 1 << 12
_MOST_SIZES = 16
_MEETINGS = 3
_FORGOTTEN = 1000
"""Plans after which a size that did not come again makes room for another one."""


class RecordedPlan:
    """The plan of up to so many keys.

    Args:
        capacity: this many.
        dtype: of the keys.
        device: where they are.
        pool: memory that plans of the same stream compute in.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device, pool: Any) -> None:
        self._kernels = kernels_of("rows.triton.plan")
        self._keys = torch.zeros(capacity, dtype=dtype, device=device)
        self._real = torch.zeros(1, dtype=torch.int32, device=device)
        self._kernels.make_plan(self._keys, real=self._real)  # kernels are compiled and loaded
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            # `torch.cuda.graph` would wait for the device and give its free memory back.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._plan: RowPlan = self._kernels.make_plan(self._keys, real=self._real)
            finally:
                self._graph.capture_end()
        finish_graph(self._graph)
        self._lent = replace(self._plan, keys=None)
        self.used = 0
        """When it was used last, counted in plans."""

    def of(self, keys: Tensor) -> RowPlan:
        """The plan of these keys, until the next one is made."""
        self._kernels.pad_keys(keys, self._keys, self._real)
        self._graph.replay()
        if self._lent.num_values != len(keys):
            self._lent = replace(self._plan, order=self._plan.order[: len(keys)], keys=None)
        return self._lent


@dataclass
class _Recordings:
    """Of this process: by device, stream, type and capacity; and how often others were met.

    `failed`: none can be made here.
    """

    made: dict[tuple[object, ...], RecordedPlan] = field(default_factory=dict)
    met: dict[tuple[object, ...], int] = field(default_factory=dict)
    num_plans: int = 0
    failed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_recordings = _Recordings()


def use_plan(keys: Tensor, use: Callable[[RowPlan], None]) -> None:
    """Let `use` queue work with the plan of these keys; the plan means nothing afterwards."""
    if _can_replay(keys):
        capacity = capacity_of(len(keys))
        name = (keys.device.index, stream_address(keys.device), keys.dtype, capacity)
        # Other threads may use this stream, too: nobody may come in between the plan and its use.
        with _recordings.lock:
            found = _find(name, keys)
            if found is not None:
                use(found.of(keys))
                return
    use(kernels_of("rows.triton.plan").make_plan(keys))


def capacity_of(num_keys: int) -> int:
    """The size that so many keys are padded to: the fewest there are, or 8 to 15 times a power of two."""
    step = max(FEWEST_KEYS, 1 << (num_keys - 1).bit_length()) // 16
    return max(FEWEST_KEYS, -(-num_keys // step) * step)


def _can_replay(keys: Tensor) -> bool:
    inside = keys.is_cuda and 0 < len(keys) <= MOST_KEYS and keys.is_contiguous()
    return inside and not _recordings.failed and not torch.cuda.is_current_stream_capturing()


def _find(name: tuple[object, ...], keys: Tensor) -> RecordedPlan | None:
    """The recording of this size, made now where it has come often enough and there is room."""
    all_of, found = _recordings, _recordings.made.get(name)
    all_of.num_plans += 1
    if found is None:
        times = all_of.met[name] = all_of.met.get(name, 0) + 1
        if times < _MEETINGS or not _has_room():
            return None
        found = _recorded(name, keys)
        if found is None:
            return None
        all_of.made[name] = found
    found.used = all_of.num_plans
    return found


def _has_room() -> bool:
    """Whether there may be one more; the one that was not used for longest goes for it, if that is long ago."""
    made = _recordings.made
    if len(made) < _MOST_SIZES:
        return True
    oldest = min(made, key=lambda name: made[name].used)
    if _recordings.num_plans - made[oldest].used < _FORGOTTEN:
        return False
    del made[oldest]
    _recordings.met.clear()
    return True


def _recorded(name: tuple[object, ...], keys: Tensor) -> RecordedPlan | None:
    device, stream, *_ = name
    try:
        return RecordedPlan(capacity_of(len(keys)), keys.dtype, keys.device, _pool(device, stream))
    except RuntimeError as error:
        _recordings.failed = True
        cause = error.__context__ or error  # what ends a recording that went wrong fails, too
        first = (str(cause) or type(cause).__name__).splitlines()[0]
        warnings.warn(
            f"sorts of rows cannot be recorded as CUDA graphs ({first}): they are started one by one",
            stacklevel=2,
        )
        return None


@cache
def _pool(device: object, stream: object) -> Any:
    return torch.cuda.graph_pool_handle()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
