"""How fast ranks of this machine talk: rows, sums and small agreements, over the transport a run would use.

Measured as it is met in a run: ranks have computed, so caches are full of other things, and they arrive one after the
other, so those that came first are asleep. Two ranks, and four to see what each more of them adds: on a machine with
fewer cores they also wait for each other's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.comm.choose import make_transport
from freescale.comm.sums import start_sum
from freescale.comm.transport import Transport
from freescale.errors import TrainingError
from freescale.profiling.hiding_cost import measure_hiding

_SIZES = (256, 4096, 65_536, 524_288, 2_097_152)
_GPU_SIZES = (*_SIZES, 8_388_608)
_TURNS = 16
_PAUSE_S, _LATER_S = 0.004, 0.001


def measure_exchanges(*, timeout_s: float = 120.0) -> dict[str, float]:
    """Latency in microseconds and rate in 10^9 bytes a second of an exchange, a sum, an agreement; cost of hiding."""
    two, four = (_measure(num_ranks, timeout_s) for num_ranks in (2, 4))
    added = {
        f"{name}_per_rank": max(0.0, (four[name] - two[name]) / 2)
        for name in ("exchange_us", "sum_us", "control_us")
    }
    return {**two, **added}


def _measure(num_ranks: int, timeout_s: float) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="freescale-profile-") as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, num_ranks, folder), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in ranks:
            process.join(max(0.1, deadline - time.monotonic()))
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        result = Path(folder, "result.json")
        if not result.exists():
            raise TrainingError(
                f"{num_ranks} ranks of this machine could not exchange anything",
                got=f"exit codes {[process.exitcode for process in ranks]}",
                next_step=f"freescale train --nproc {num_ranks} run.steps=5 shows why",
            )
        return {name: float(value) for name, value in json.loads(result.read_text()).items()}


def _rank(rank: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    size = str(num_ranks)
    os.environ.update(RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, LOCAL_RANK=str(rank))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    group = dist.group.WORLD
    assert group is not None
    rates = measure_links(make_transport(group), torch.device("cpu"))
    if num_ranks == 2:
        rates |= measure_hiding(rank, group)
    if rank == 0:
        aside = Path(folder, "result.part")
        aside.write_text(json.dumps(rates))
        aside.replace(Path(folder, "result.json"))
    dist.barrier()
    dist.destroy_process_group()


def measure_links(transport: Transport, device: torch.device) -> dict[str, float]:
    """Latency and rate of exchanges, of sums and of agreements between these ranks; every rank must call it.

    An exchange counts the bytes that leave a rank for others, a sum those of its values. From a GPU the clock also has
    what a call costs the host, as a rank that comes out of a wait with nothing queued has it.
    """
    peers, sizes = transport.num_ranks - 1, _SIZES if device.type == "cpu" else _GPU_SIZES

    def settled(work: Callable[[], Any]) -> Callable[[], Any]:
        def both() -> None:
            work()
            torch.cuda.synchronize(device)

        return work if device.type == "cpu" else both

    def exchange(count: int) -> Callable[[], Any]:
        counts = [count] * transport.num_ranks
        rows = torch.zeros(sum(counts), dtype=torch.uint8, device=device)
        return settled(lambda: transport.start(rows, send=counts, receive=counts).wait())

    def add_up(count: int) -> Callable[[], Any]:
        values = torch.zeros(count // 4, device=device)
        return settled(lambda: start_sum(transport, values).wait())

    agreement = torch.zeros(12, dtype=torch.float64, device=device)
    rates = _line("exchange", {peers * size: _usual_s(exchange(size)) for size in sizes})
    rates |= _line("sum", {size: _usual_s(add_up(size)) for size in sizes})
    rates["control_us"] = 1e6 * _usual_s(settled(lambda: start_sum(transport, agreement).wait()))
    return rates


def _usual_s(work: Callable[[], Any]) -> float:
    """Seconds from the last rank's arrival until a rank goes on, the mean of all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    took = []
    for turn in range(_TURNS + 1):
        _compute(_PAUSE_S + _LATER_S * ((turn + rank) % num_ranks))
        # All processes of a machine share this clock.
        arrived = time.monotonic()
        work()
        mine = torch.tensor([arrived, time.monotonic()], dtype=torch.float64)
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
