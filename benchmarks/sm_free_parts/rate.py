"""GB/s and microseconds of exchanges by size, against pinned copies."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from freescale.comm.transport import Transport
from freescale.comm.world.ranks import Ranks
from freescale.prove.beside import Times, exchanges, pinned_copies
from freescale.prove.stamped_rows import exchange, open_all, rows_of, synchronize_all, warm_up


def measure(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """GB/s a direction, summed over the ranks, and microseconds of one exchange, by bytes a pair."""
    on_gpu = ranks.device.type == "cuda"
    ceiling = pinned_rate(ranks, 64 << 20, pieces=1) if on_gpu else None
    table, engines = [], {}
    num_bytes = 4 << 10
    while num_bytes <= options.largest_kib << 10:
        row: dict[str, Any] = {"bytes_a_pair": num_bytes}
        if on_gpu:
            row["pinned_gb_s"] = pinned_rate(ranks, num_bytes, pieces=ranks.num_ranks - 1)
        # Opened for each size: slots grow with the messages, and do so at fixed exchanges.
        found, problems = open_all(ranks, options.kinds)
        rows, counts = rows_of(ranks, num_bytes)
        for transport in found.values():
            warm_up(transport, ranks, num_bytes)
        alone = microseconds(ranks, found, rows, counts)
        for name, transport in found.items():
            rates = {
                on_the_way: rate(
                    ranks,
                    exchanges([transport], rows, counts, on_the_way=on_the_way),
                    num_bytes * (ranks.num_ranks - 1),
                )
                for on_the_way in (3, 1)
            }
            row[name] = {"gb_s": rates[3], "gb_s_in_a_row": rates[1], "us_alone": alone[name]}
            engines[name] = [transport.engine, transport.sm_free]
        table.append(row)
        num_bytes *= 4
    return {"results": table, "ceiling_gb_s": ceiling, "engines": engines, "not_available": problems}


def microseconds(
    ranks: Ranks, found: dict[str, Transport], rows: torch.Tensor, counts: list[int], *, turns: int = 40
) -> dict[str, float]:
    """Of one exchange alone, by each transport in turn: medians, averaged over the ranks."""
    taken: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(turns):
        for name, transport in found.items():
            synchronize_all(ranks)
            began = time.perf_counter()
            exchange(transport, rows, counts)
            if ranks.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            taken[name].append(time.perf_counter() - began)
    medians = torch.tensor([statistics.median(each) for each in taken.values()], dtype=torch.float64)
    means = ranks.sum_on_cpu(medians) / ranks.num_ranks
    return {name: 1e6 * float(mean) for name, mean in zip(taken, means)}


def rate(ranks: Ranks, comm: Times, num_bytes: int) -> float:
    """GB/s of all ranks together, each of which moves so many bytes a time."""
    times = max(12, min(400, (512 << 20) // max(1, num_bytes)))
    synchronize_all(ranks)
    began = time.perf_counter()
    comm(times)
    synchronize_all(ranks)
    return ranks.num_ranks * num_bytes * times / (time.perf_counter() - began) / 1e9


def pinned_rate(ranks: Ranks, num_bytes: int, *, pieces: int) -> float:
    """GB/s a direction of plain pinned copies of this size, both directions and all ranks at once."""
    copies = pinned_copies(ranks.device, num_bytes, pieces=pieces)
    copies(2)
    return rate(ranks, copies, num_bytes * pieces)


def show(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """The table, with pinned copies where there is a GPU."""
    names, ceiling = list(result["engines"]), result["ceiling_gb_s"]
    if ceiling:
        print(f"  pinned copies of 64 MiB, all ranks at once: {ceiling:.1f} GB/s a direction")
    print("  GB/s: three on the way / one after the other; us: one alone")
    heads = [f"{name}: GB/s" for name in names] + [f"{name}: us" for name in names]
    pinned = f"{'pinned: GB/s':>14}" if ceiling else ""
    print(f"  {'KiB a pair':>10}{pinned}" + "".join(f"{head:>20}" for head in heads))
    missed = []
    for row in result["results"]:
        rates = "".join(f"{row[n]['gb_s']:12.2f} /{row[n]['gb_s_in_a_row']:6.2f}" for n in names)
        alone = "".join(f"{row[n]['us_alone']:20.1f}" for n in names)
        pinned = f"{row['pinned_gb_s']:14.2f}" if ceiling else ""
        print(f"  {row['bytes_a_pair'] >> 10:>10}{pinned}{rates}{alone}")
        if "host_staged" not in row or not ceiling:
            continue
        if row["bytes_a_pair"] >= 1 << 20 and row["host_staged"]["gb_s"] < 0.85 * ceiling:
            share = row["host_staged"]["gb_s"] / ceiling
            missed.append(
                f"{row['bytes_a_pair'] >> 20} MiB a pair: {share:.0%} of the pinned copies, 85 % asked"
            )
        best = min(row[name]["us_alone"] for name in names)
        if row["bytes_a_pair"] == 4 << 10 and row["host_staged"]["us_alone"] > 2 * best:
            missed.append("4 KiB a pair: host_staged takes more than twice the best transport's time")
    return missed
