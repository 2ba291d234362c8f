"""DLRMv4 on one GPU: samples a second and MFU at real lengths, with tables that fill it; the reference beside it.

    PYTHONPATH=. python benchmarks/dlrmv4_speed.py --write batch.npz             # on any CPU: a batch of 1,024
    PYTHONPATH=. python benchmarks/dlrmv4_speed.py --data batch.npz [--peer DIR] # on a GPU

A step is all of it but loading and finding unique ids, which training does ahead: rows of 11 tables, item vectors,
forward, backward, clipped Adam, row-wise Adagrad.
Samples are 2.5 anchors of each of 410 listeners, which is what one of eight ranks gets of 8,192 anchors in the order of
the benchmark. Two yardsticks: FLOPs of the three layers at the real lengths, and at 4,096 tokens for every sample, as
the reference counts them. A short last layer computes less, and is measured by the same yardsticks.

DIR is the folder `recommendation_v4` of a checkout of mlcommons/training. Its dense code is run with its own kernels on
the same samples, rows given; no tables, no optimizer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dlrmv4_parts.reference import stand_ins
from dlrmv4_parts.samples import Batch, write
from dlrmv4_parts.step import CROSS_ROWS, DIM, LAYERS, LENGTH, REAL, Trainer, check, theirs_on
from torch import Tensor

from freescale.embedding import ShardedEmbedding, TableSpec
from freescale.embedding.optimizers.rowwise_adagrad import RowwiseAdagrad
from freescale.embedding.tables.table import EmbeddingTable

PEAK = 989e12
"""bf16 of an H100 or H200, dense."""


def flops(tokens: np.ndarray) -> tuple[float, float]:
    """FLOPs a sample of the three layers, forward and backward: at these lengths, and at 4,096 tokens."""

    def of(linear: float, square: float) -> float:
        products = 6 * linear * DIM * (4 * DIM + 3 * DIM)
        return LAYERS * (products + 7 * square / 2 * 2 * DIM)

    return of(float(tokens.mean()), float(np.mean(tokens.astype(float) ** 2))), of(LENGTH, float(LENGTH) ** 2)


def timed(call: Callable[[], Any], *, rounds: int, warmup: int, device: str) -> list[float]:
    """Seconds of each round. Rounds follow each other as steps of a training do: nobody waits in between."""
    for _ in range(warmup):
        call()
    if device == "cpu":
        ends = [time.perf_counter()]
        for _ in range(rounds):
            call()
            ends.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(ends)]
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]


def report(name: str, seconds: list[float], batch: Batch, device: str, **others: Any) -> dict[str, Any]:
    """One row, printed as it comes."""
    real, dense = flops(batch.tokens)
    best = float(np.median(seconds))
    rate = batch.samples / best
    memory = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    row = {
        "name": name,
        "samples": batch.samples,
        "micro-batch": len(batch.parts[0]),
        "ms": [round(1000 * each, 2) for each in seconds],
        "samples/s": rate,
        "mfu_real": rate * real / PEAK,
        "mfu_4096": rate * dense / PEAK,
        "peak_gb": memory,
        **others,
    }
    print(
        f"{name:44} {batch.samples:>6} {1000 * best:>9.1f} {rate:>10.0f} {row['mfu_real']:>7.1%} "
        f"{row['mfu_4096']:>7.1%} {memory:>8.1f}   {' '.join(f'{1000 * each:.1f}' for each in seconds)}",
        flush=True,
    )
    return row


def _any_numbers(table: EmbeddingTable, rows: Tensor) -> Tensor:
    weight = table.weight
    return torch.randn(len(rows), table.dim, dtype=weight.dtype, device=weight.device) * table._init_std


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="make a batch and stop")
    parser.add_argument("--data", type=Path, help="a batch that was written")
    parser.add_argument("--peer", type=Path, help="folder recommendation_v4 of a checkout")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--micro", type=int, default=256)
    parser.add_argument("--users", type=int, default=410)
    parser.add_argument("--crosses", type=float, default=8.3, help="rows of crosses are divided by it")
    parser.add_argument(
        "--tables", type=float, default=1.0, help="rows of the other tables are divided by it"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--quick-tables", action="store_true", help="fill tables with any numbers, in less time"
    )
    parser.add_argument("--check", action="store_true", help="hold the kernels against float64 first")
    parser.add_argument(
        "--dense", action="store_true", help="also without tables and optimizers, as the peer is run"
    )
    parser.add_argument("--only", nargs="*", help="of: whole short occurrences peer")
    options = parser.parse_args()
    if options.write:
        write(options.write, samples=options.samples, users=options.users, seed=1)
        return
    saved = dict(np.load(options.data))
    device, only = options.device, options.only or ["whole", "short", "occurrences", "peer"]
    rows = {name: int(count / options.tables) for name, count in REAL.items()}
    rows |= {name: int(count / options.crosses) for name, count in CROSS_ROWS.items()}
    if options.check:
        check(saved, device)
    if options.quick_tables:
        EmbeddingTable.initial = _any_numbers  # type: ignore[method-assign]
    began = time.perf_counter()
    specs = [
        TableSpec(
            name=name, num_rows=count, dim=DIM, optimizer=RowwiseAdagrad(), init_std=(3 * count) ** -0.5
        )
        for name, count in rows.items()
    ]
    embedding = ShardedEmbedding(specs, group=None, device=torch.device(device))
    if device == "cuda":
        torch.cuda.synchronize()
    gigabytes = sum(rows.values()) * DIM * 4 / 1e9
    print(
        f"{sum(rows.values()):,} rows in 11 tables, {gigabytes:.1f} GB, made in {time.perf_counter() - began:.1f} s"
    )
    print(
        f"{'':44} {'batch':>6} {'ms':>9} {'samples/s':>10} {'real':>7} {'4,096':>7} {'peak GB':>8}   rounds (ms)"
    )
    found = []

    def made(samples: int, *, once: bool = True) -> Batch:
        return Batch(saved, samples=samples, micro=options.micro, once=once, rows=rows, device=device)

    shape = {"rounds": options.rounds, "warmup": options.warmup, "device": device}
    whole = made(options.samples)
    cases = [("whole", False, whole, "last layer whole"), ("short", True, whole, "last layer short")]
    if "occurrences" in only:
        part = made(options.micro)
        every = made(options.micro, once=False)
        cases += [
            ("occurrences", True, part, "one micro-batch, items once"),
            ("occurrences", True, every, "one micro-batch, every occurrence"),
        ]
    if options.dense:
        cases.append(
            ("dense", True, made(options.micro), "one micro-batch, dense code alone, last layer short")
        )
        cases.append(("dense", False, cases[-1][2], "one micro-batch, dense code alone, last layer whole"))
    for key, short, batch, name in cases:
        if key not in only and key != "dense":
            continue
        trainer = Trainer(short=short, device=device, embedding=embedding)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            call = trainer.dense(batch) if key == "dense" else (lambda: trainer.step(batch))  # noqa: B023
            seconds = timed(call, **shape)
            share = batch.num_items / batch.occurrences
            found.append(report(name, seconds, batch, device, items_share=share))
        except torch.OutOfMemoryError as error:
            print(f"{name}: {str(error)[:200]}", flush=True)
        trainer = call = None
        if device == "cuda":
            torch.cuda.empty_cache()
    if options.peer and "peer" in only:
        sys.path.insert(0, str(options.peer))
        made_up = stand_ins()
        del embedding
        if device == "cuda":
            torch.cuda.empty_cache()
        batch = made(options.micro)
        kernels = "TRITON" if device == "cuda" else "PYTORCH"
        try:
            call = theirs_on(batch, saved, samples=options.micro, device=device, kernels=kernels)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = timed(call, **shape)
            found.append(
                report(f"reference, dense code alone ({kernels})", seconds, batch, device, stood_in=made_up)
            )
        except Exception as error:
            print(f"reference ({kernels}) cannot run: {type(error).__name__}: {str(error)[:300]}", flush=True)
    facts = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    print(json.dumps({"claim": "dlrmv4_speed", "tables_gb": gigabytes, "rows": found, **facts}))


if __name__ == "__main__":
    main()
