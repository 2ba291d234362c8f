"""Which kernels the profiler links to an exchange; it calls what the driver copies inside a GPU copies, too."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from freescale.comm.world.ranks import Ranks
from freescale.prove.stamped_rows import exchange, open_all, rows_of, synchronize_all, warm_up

WAITS = ("Event", "Sync")


def measure(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """What runs on the GPU during five exchanges, by the profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    found, problems = open_all(ranks, options.kinds)
    rows, counts = rows_of(ranks, 1 << 20, own=False)  # what stays is copied in place, by a kernel
    seen: dict[str, Any] = {}
    for name, transport in found.items():
        warm_up(transport, ranks, 1 << 20)
        synchronize_all(ranks)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
            for _ in range(5):
                exchange(transport, rows, counts)
            torch.cuda.synchronize()
        synchronize_all(ranks)
        names = [event.name for event in record.events() if event.device_type == DeviceType.CUDA]
        copies = [one for one in names if one.startswith(("Memcpy", "Memset"))]
        # The profiler may also tell of waits ("Stream Wait Event", "Context Sync"): nothing runs for them.
        kernels = sorted({one for one in names if one not in copies and not any(w in one for w in WAITS)})
        inside = [one for one in copies if "DtoD" in one]
        seen[name] = {
            "copies": len(copies),
            "inside": len(inside),
            "kernels": kernels,
            "profiler_saw_anything": bool(names),
        }
    return {"results": seen, "not_available": problems}


def show(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """A line for each transport."""
    missed = []
    for name, row in result["results"].items():
        kernels = ", ".join(row["kernels"]) or "none"
        print(f"  {name:<15} {row['copies']:>4} copies, {row['inside']} inside the GPU, kernels: {kernels}")
        if name == "host_staged" and (row["kernels"] or row["inside"] or not row["profiler_saw_anything"]):
            missed.append("host_staged: kernels in the trace, or the profiler saw nothing")
    return missed
