"""How fast two ranks of this machine talk: rows, sums and small agreements, over the transport a run would use."""

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
from freescale.errors import TrainingError
from freescale.profiling.hiding_cost import measure_hiding

_SIZES = (256, 4096, 65_536, 524_288, 2_097_152)
_TURNS = 12


def measure_exchanges(*, timeout_s: float = 120.0) -> dict[str, float]:
    """Latency in microseconds and rate in 10^9 bytes a second of an exchange, a sum, an agreement; cost of hiding."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="freescale-profile-") as folder:
        ranks = [context.Process(target=_rank, args=(rank, folder), daemon=True) for rank in range(2)]
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
                "two ranks of this machine could not exchange anything",
                got=f"exit codes {[process.exitcode for process in ranks]}",
                next_step="freescale train --nproc 2 run.steps=5 shows why",
            )
        return {name: float(value) for name, value in json.loads(result.read_text()).items()}


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    transport = make_transport(group)

    def exchange(count: int) -> Callable[[], Any]:
        rows = torch.zeros(2 * count, dtype=torch.uint8)
        return lambda: transport.start(rows, send=[count, count], receive=[count, count]).wait()

    def add_up(count: int) -> Callable[[], Any]:
        values = torch.zeros(count // 4)
        return lambda: start_sum(transport, values).wait()

    agreement = torch.zeros(12, dtype=torch.float64)
    rates = _line("exchange", {size: _usual_s(exchange(size)) for size in _SIZES})
    rates |= _line("sum", {size: _usual_s(add_up(size)) for size in _SIZES})
    rates["control_us"] = 1e6 * _usual_s(lambda: dist.all_reduce(agreement), pause_s=0.02)
    rates |= measure_hiding(rank, group)
    if rank == 0:
        aside = Path(folder, "result.part")
        aside.write_text(json.dumps(rates))
        aside.replace(Path(folder, "result.json"))
    dist.barrier()
    dist.destroy_process_group()


def _usual_s(work: Callable[[], Any], *, pause_s: float = 0.004) -> float:
    """As in a run: both ranks have computed for a while, then arrive together."""
    times = []
    for _ in range(_TURNS + 1):
        until = time.perf_counter() + pause_s
        while time.perf_counter() < until:
            torch.zeros(64).sum()
        dist.barrier()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    # What lies above is other programs' doing.
    return min(times[1:])


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
