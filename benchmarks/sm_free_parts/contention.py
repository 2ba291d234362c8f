"""Compute beside communication: what each costs the other."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import torch

from freescale.comm.world.ranks import Ranks
from freescale.prove.beside import Times, beside, compute_jobs, exchanges, nothing, pinned_copies, repeated
from freescale.prove.stamped_rows import open_all, rows_of, warm_up


def measure(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Rank 0 computes on the whole GPU while all ranks exchange, or a copy kernel runs beside."""
    from gpu_kernels import BlockCopy

    num_bytes = 4 << 20
    kinds = [kind for kind in options.kinds if kind != "collective"]
    found, problems = open_all(ranks, kinds)
    second, _ = open_all(ranks, [kind for kind in kinds if not kind.startswith("nccl:")])
    rows, counts = rows_of(ranks, num_bytes)
    for transport in (*found.values(), *second.values()):
        warm_up(transport, ranks, num_bytes)
    jobs = compute_jobs(ranks.device, options.gemm)
    source, target = (torch.zeros(64 << 20, dtype=torch.uint8, device=ranks.device) for _ in range(2))
    comms: dict[str, Times] = {}
    for name, transport in found.items():
        comms[name] = exchanges([transport], rows, counts)
        # As a pipeline has them: rows wanted soon and rows wanted later each have a transport.
        if name in second:
            comms[f"{name}, four on two"] = exchanges([transport, second[name]], rows, counts, on_the_way=4)
    comms["plain pinned copies"] = pinned_copies(ranks.device, num_bytes, pieces=ranks.num_ranks - 1)
    # What stands in for NCCL where it cannot be had.
    stand_ins = () if any(name.startswith("nccl:") for name in found) else (8, 16, 24, 32)
    blocks = {f"copy kernel, {n} blocks": BlockCopy(n) for n in stand_ins}
    results = []
    for job, compute in jobs.items():
        for name in (*blocks, *comms):
            everybody = name in comms
            moved = num_bytes * (ranks.num_ranks - 1) if everybody else source.nbytes
            if everybody:
                comm = comms[name]
            elif ranks.is_first:
                comm = repeated(functools.partial(blocks[name], target, source))
            else:
                comm = nothing
            row = {"compute": job, "beside": name}
            row |= beside(ranks, compute, comm, moved, window_ms=options.window_ms)
            results.append(row)
            if ranks.is_first:  # a run that is cut off has shown what it had
                print(f"  {line_of(row)}", file=sys.stderr, flush=True)
    return {"results": results, "not_available": problems}


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    cells = f"{row['compute_ms']:12.3f}{row['slowdown']:11.3f}x{row['gb_s_alone']:12.1f}"
    cells += f"{row['gb_s_loaded']:12.1f}{row['rate_kept']:12.1%}"
    return f"{row['compute'] + ' + ' + row['beside']:<60}" + cells


def show(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """The table."""
    names = ("compute ms", "slowdown", "GB/s alone", "GB/s loaded", "kept")
    print(f"  {'':<60}" + "".join(f"{name:>12}" for name in names))
    missed = []
    for row in result["results"]:
        print(f"  {line_of(row)}")
        if row["beside"].startswith("host_staged") and (row["slowdown"] > 1.02 or row["rate_kept"] < 0.95):
            missed.append(
                f"{row['beside']} beside {row['compute']}: at most 1.02x and at least 95 % were asked"
            )
    return missed
