"""How fast ranks of this machine talk: rows, sums and small agreements, over the transport a run would use.

On CPUs measured as it is met in a run: ranks have computed, so caches are full of other things; they arrive one after
the other, so those that came first are asleep; and who has all it waited for computes again, so where ranks share cores
the others get less of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.comm import Transport
from freescale.comm.traffic import start_all_reduce
from freescale.profiling.stopwatch import HEAD_START_CYCLES

_SIZES = (256, 4096, 65_536, 524_288, 2_097_152)
_GPU_SIZES = (*_SIZES, 8_388_608)
_TURNS, _QUEUED = 16, 8
_BEFORE_S, _LATER_S, _AFTER_S = 0.004, 0.001, 0.002


def measure_links(transport: Transport, device: torch.device) -> dict[str, float]:
    """Latency and rate of exchanges, of sums and of agreements between these ranks; every rank must call it.

    An exchange counts the bytes that leave a rank for others, a sum those of its values. On GPUs the host is ahead, so
    only what the GPUs take counts, and losses, which hosts add up for a step that is long past, take nothing.
    """
    peers, on_gpu = transport.num_ranks - 1, device.type == "cuda"
    sizes, took = (_GPU_SIZES, _queued_s) if on_gpu else (_SIZES, _usual_s)

    def exchange(count: int) -> Callable[[], Any]:
        counts = [count] * transport.num_ranks
        rows = torch.zeros(sum(counts), dtype=torch.uint8, device=device)
        return lambda: transport.start(rows, send=counts, receive=counts).wait()

    def all_reduce(count: int) -> Callable[[], Any]:
        values = torch.zeros(count // 4, device=device)
        return lambda: start_all_reduce(transport, values).wait()

    took(exchange(max(sizes)))  # slots of rings grow with the messages, at the 8th and at the 64th
    rates = _line("exchange", {peers * size: took(exchange(size)) for size in sizes})
    rates |= _line("sum", {size: took(all_reduce(size)) for size in sizes})
    agreement = torch.zeros(12, dtype=torch.float64)
    rates["control_us"] = 0.0 if on_gpu else 1e6 * took(lambda: start_all_reduce(transport, agreement).wait())
    return rates


def _queued_s(work: Callable[[], Any]) -> float:
    """Seconds of one of several that are queued one behind the other on a GPU, the mean of all ranks."""
    took = []
    for _ in range(_TURNS // 2):
        dist.barrier()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        began.record()
        for _ in range(_QUEUED):
            work()
        ended.record()
        torch.cuda.synchronize()
        mine = torch.tensor([1e-3 * began.elapsed_time(ended) / _QUEUED], dtype=torch.float64)
        dist.all_reduce(mine)
        took.append(float(mine) / dist.get_world_size())
    return sorted(took[1:])[len(took) // 4]


def _usual_s(work: Callable[[], Any]) -> float:
    """Seconds from the last rank's arrival until a rank goes on, the mean of all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    took = []
    for turn in range(_TURNS + 1):
        _compute(_BEFORE_S + _LATER_S * ((turn + rank) % num_ranks))
        # All processes of a machine share this clock.
        arrived = time.monotonic()
        work()
        mine = torch.tensor([arrived, time.monotonic()], dtype=torch.float64)
        _compute(_AFTER_S)
        everybody = [torch.empty_like(mine) for _ in range(num_ranks)]
        dist.all_gather(everybody, mine)
        arrivals, ends = torch.stack(everybody).unbind(1)
        took.append(float((ends - arrivals.max()).mean()))
    # What lies above the lower quarter is other programs' doing.
    return sorted(took[1:])[_TURNS // 4]


def _compute(seconds: float) -> None:
    """What a model does to a core and its caches."""
    matrix = torch.zeros(1 << 20)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        matrix += 1.0


def _line(name: str, seconds: dict[int, float]) -> dict[str, float]:
    """Latency and rate: the line with the least relative error, its latency at most that of the smallest message."""
    sizes, times = np.array(list(seconds), dtype=np.float64), np.array(list(seconds.values()))
    smallest = float(times[sizes.argmin()])
    latency, per_byte = np.linalg.lstsq(
        np.stack([1 / times, sizes / times], axis=1), np.ones(len(sizes)), rcond=None
    )[0]
    latency = min(max(float(latency), 0.0), smallest)
    if per_byte <= 0:
        per_byte = float(times.max()) / float(sizes.max())
    return {f"{name}_us": 1e6 * latency, f"{name}_gb_per_s": 1e-9 / float(per_byte)}
