"""Two ways between CPU ranks of one machine: unix sockets (local) and rings in shared memory (host_staged).

    python benchmarks/cpu_transports.py [--ranks 2,4] [--rounds 9] [--trainings 3] [--quick]

Both must deliver what torch.distributed delivers and add up to the same bits, or no speed is printed. Then, in one
program, rounds of both alternate, each begun together by all ranks: counts, rows and all-reduce of 1 KB to 16 MB a
rank. A time is that of the slowest rank; the ratio is rings / sockets within a round, its median and quartiles over
the rounds. Last `freescale train` runs on both in turn, and its steps are compared. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from freescale.comm import exchange_counts
from freescale.comm.traffic import start_all_reduce
from freescale.comm.transport import Transport
from freescale.comm.transports.registry import make_transport
from freescale.comm.world import launcher
from freescale.comm.world.joining import join_ranks
from freescale.comm.world.ranks import Ranks
from freescale.errors import FreeScaleError

KINDS = ("local", "host_staged")
SIZES = tuple(1 << power for power in (10, 14, 18, 20, 22, 24))
WIDTH = 64
ROUND_BYTES, MOST_TIMES = 32 << 20, 50
"""A round moves about as much, but no more often than this."""
STEPS = 40


def equal_splits(num_bytes: int, num_ranks: int) -> tuple[torch.Tensor, list[int]]:
    """Rows of a rank that sends this many bytes, the same number to every rank."""
    rows = max(1, num_bytes // (4 * WIDTH * num_ranks))
    return torch.randn(rows * num_ranks, WIDTH), [rows] * num_ranks


def check(transports: dict[str, Transport], ranks: Ranks) -> None:
    """Uneven rows, counts and sums against torch.distributed; raises AssertionError where a bit differs."""
    reference = make_transport(ranks.group, kind="collective")
    rng = random.Random(7)
    for size in (0, 1, 100, 30_000):
        table = [[rng.randint(0, size) for _ in range(ranks.num_ranks)] for _ in range(ranks.num_ranks)]
        send, receive = table[ranks.rank], [row[ranks.rank] for row in table]
        rows, values = torch.randn(sum(send), WIDTH), torch.randn(max(1, size))
        wanted = reference.start(rows, send=send, receive=receive).wait()
        summed = start_all_reduce(reference, values).wait()
        for name, transport in transports.items():
            assert exchange_counts(transport, torch.tensor(send)).tolist() == receive, name
            assert torch.equal(transport.start(rows, send=send, receive=receive).wait(), wanted), name
            assert torch.equal(start_all_reduce(transport, values).wait(), summed), name


def works(num_ranks: int, sizes: tuple[int, ...]) -> dict[str, tuple[Callable[[Transport], object], int]]:
    """What is timed, and how often in a round."""
    counts = torch.arange(num_ranks)
    found: dict[str, tuple[Callable[[Transport], object], int]] = {
        "counts": (lambda transport: exchange_counts(transport, counts), MOST_TIMES)
    }
    for size in sizes:
        times = max(2, min(MOST_TIMES, ROUND_BYTES // size))
        rows, split = equal_splits(size, num_ranks)
        found[f"rows {label(size)}"] = (
            lambda transport, rows=rows, split=split: transport.start(rows, send=split, receive=split).wait(),
            times,
        )
        values = torch.randn(size // 4)
        found[f"all-reduce {label(size)}"] = (
            lambda transport, values=values: start_all_reduce(transport, values).wait(),
            times,
        )
    return found


def measure(ranks: Ranks, rounds: int, sizes: tuple[int, ...]) -> dict[str, dict[str, list[float]]]:
    """Microseconds of each round, by work and kind: those of the slowest rank."""
    transports = {kind: make_transport(ranks.group, kind=kind) for kind in KINDS}
    check(transports, ranks)
    found: dict[str, dict[str, list[float]]] = {}
    for name, (work, times) in works(ranks.num_ranks, sizes).items():
        found[name] = {kind: [] for kind in KINDS}
        for number in range(rounds + 1):
            for kind in KINDS if number % 2 else KINDS[::-1]:
                transport = transports[kind]
                work(transport)
                ranks.barrier()
                began = time.perf_counter()
                for _ in range(times):
                    work(transport)
                us = 1e6 * (time.perf_counter() - began) / times
                everybody = [0.0] * ranks.num_ranks
                torch.distributed.all_gather_object(everybody, us, group=ranks.control)
                if number:  # the first lets slots grow and buffers settle
                    found[name][kind].append(max(everybody))
    return found


def as_rank(options: argparse.Namespace) -> None:
    """One rank; the first leaves the times in a file."""
    torch.set_num_threads(1)
    with join_ranks(device="cpu", timeout_s=120) as ranks:
        found = measure(ranks, options.rounds, SIZES[:3] if options.quick else SIZES)
        if ranks.is_first:
            Path(options.result).write_text(json.dumps(found))
        ranks.barrier()


def time_exchanges(options: argparse.Namespace, num_ranks: int) -> dict[str, dict[str, list[float]]]:
    """The times of this many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        command = ["--rank", "--rounds", str(options.rounds), "--result", str(result)]
        command += ["--quick"] if options.quick else []
        try:
            launcher.launch(
                command, num_ranks=num_ranks, environment={"OMP_NUM_THREADS": "1"}, program=(__file__,)
            )
        except FreeScaleError as error:
            raise SystemExit(f"FAILED: no speed is told where a check fails: {error}") from None
        return json.loads(result.read_text())


def time_trainings(options: argparse.Namespace, num_ranks: int) -> dict[str, list[float]]:
    """Median milliseconds of a step of short trainings on both, in turn; their losses must be equal."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(options.trainings):
        losses = []
        for kind in KINDS if number % 2 else KINDS[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                train(kind, num_ranks, folder)
                lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
                steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
            losses.append([step["loss"] for step in steps])
            found[kind].append(statistics.median(step["step_ms"] for step in steps[10:]))
        assert losses[0] == losses[1], "the transport has changed what is learned"
    return found


def train(kind: str, num_ranks: int, folder: str) -> None:
    """A short run of the embedded data."""
    keys = [f"comm.transport={kind}", f"run.out={folder}", f"run.steps={STEPS}", "run.device=cpu"]
    keys += ["run.log_every=1", "run.eval_every=100000", "run.checkpoint_every=100000", "model.dropout=0"]
    keys += ["balance.refit_every=null"]  # measured times would decide who computes what
    command = [sys.executable, "-m", "freescale", "train", *keys, "--nproc", str(num_ranks)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"FAILED: training on {kind}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def spread(ratios: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


def row(name: str, times: dict[str, list[float]], unit: str) -> dict[str, Any]:
    """A line of the table, and what it says."""
    sockets, rings = (times[kind] for kind in KINDS)
    low, ratio, high = spread([b / a for a, b in zip(sockets, rings, strict=True)])
    print(
        f"{name:<20} {statistics.median(sockets):>11.1f} {statistics.median(rings):>11.1f} {unit}"
        f" {ratio:>7.2f}  ({low:.2f} to {high:.2f})",
        flush=True,
    )
    return {
        "name": name,
        "unit": unit,
        **{kind: statistics.median(times[kind]) for kind in KINDS},
        "ratio": ratio,
        "quartiles": [low, high],
    }


def label(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KB"


def main() -> None:
    """Measure, print the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=9, help="of exchanges; 0: none")
    parser.add_argument("--trainings", type=int, default=3, help="pairs of runs; 0: none")
    parser.add_argument("--quick", action="store_true", help="small messages only")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        launcher.as_rank(lambda: as_rank(options))
    results: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    for num_ranks in map(int, options.ranks.split(",")):
        print(f"\n{num_ranks} ranks, {os.cpu_count()} cores")
        print(f"{'':<20} {'sockets':>11} {'rings':>11}      ratio  (quartiles)")
        times_of = time_exchanges(options, num_ranks) if options.rounds else {}
        lines = [row(name, times, "us") for name, times in times_of.items()]
        if options.trainings:
            lines.append(row("step of a training", time_trainings(options, num_ranks), "ms"))
        results[f"{num_ranks} ranks"] = lines
    print(json.dumps(results))


if __name__ == "__main__":
    main()
