"""Traces as the torch profiler writes them, of a made-up program whose every wait is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

COMPUTE_US = (40_000, 55_000, 70_000, 80_000)
"""Kernel time of each rank before the collective of a step."""

TRANSFER_US, HOST_US, COPY_US = 8_000, 5_000, 2_000
STEPS = 3


def write_traces(
    folder: Path,
    *,
    compute_us: tuple[int, ...] = COMPUTE_US,
    steps: int = STEPS,
    profiler_steps: bool = True,
    skew_us: float = 0.0,
    compress: bool = False,
) -> list[Path]:
    """A step: 5 ms of nothing, a 2 ms copy, compute in two kernels 1 us apart, then a sum that takes 8 ms."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    slowest = max(compute_us)
    length = HOST_US + COPY_US + slowest + TRANSFER_US
    for rank, mine in enumerate(compute_us):
        shift = 1e12 + (skew_us if rank == 1 else 0.0)
        events = []
        for step in range(steps):
            zero = shift + step * length
            start = zero + HOST_US
            # The wait is inside the collective's kernel: it begins early on a rank that is done early.
            sum_start = start + COPY_US + mine
            events += [
                _event("Memcpy HtoD", "gpu_memcpy", start, COPY_US, stream=20),
                _event("gemm", "kernel", start + COPY_US, mine / 2, stream=7),
                _event("attention", "kernel", start + COPY_US + mine / 2, mine / 2, stream=7),
                _event(
                    "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                    "kernel",
                    sum_start,
                    zero + length - sum_start,
                    stream=20,
                    **{"Process Group Name": "0", "Collective name": "allreduce"},
                ),
            ]
            events += [
                _event("cudaLaunchKernel", "cuda_runtime", zero + place, 1, stream=1, launches=event)
                for place, event in enumerate(events[-4:])
            ]
            if profiler_steps:
                events.append(_event(f"ProfilerStep#{step}", "gpu_user_annotation", zero, length, stream=7))
                events.append(_event(f"ProfilerStep#{step}", "user_annotation", zero, length, stream=1))
        content = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": len(compute_us)},
            "traceEvents": events,
        }
        path = folder / f"rank-{rank}.json{'.gz' if compress else ''}"
        text = json.dumps(content).encode()
        path.write_bytes(gzip.compress(text) if compress else text)
        paths.append(path)
    return paths


def _event(
    name: str, kind: str, start: float, length: float, *, stream: int, launches: Any = None, **more: str
) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if launches is not None:
        arguments = {"correlation": launches["args"]["correlation"]}
    elif not kind.endswith("annotation"):
        arguments = {"stream": stream, "device": 0, "correlation": int(start) % 10**9, **more}
    where = {"pid": 0 if "stream" in arguments else 999, "tid": stream}
    return {"ph": "X", "cat": kind, "name": name, **where, "ts": start, "dur": length, "args": arguments}
