r"""The tables of MLPerf's DLRMv4 at a hundredth of their rows on 2 and 4 ranks: what travels, and whom it loads.

    python benchmarks/dlrmv4_tables.py --ranks 2 4                                    # virtual GPUs of one H200
    python benchmarks/dlrmv4_tables.py --device cpu --ranks 2 --scale 2000 --dim 16 --tokens 1500 --steps 12 --warmup 4

Tables: item, artist, album, user and the seven crosses, and two tiny ones of hour and organic that crosses are made of.
Ids follow Zipf 1.0. Each number of ranks trains in turns

    every occurrence   an id, a row and a gradient travel for every event, target and negative
    unique rows        each row once a rank, table and step, whichever features ask for it
    prioritized        the same, and rows that have time travel under compute

Checked first: all runs of one number of ranks have one loss curve, and the bytes of the tables add up to those of the
step. Then: milliseconds a step, MB a step over all ranks (sent; what a rank owns itself does not travel), and of every
owner of a hot table, the rows it has to serve: the busiest one over the mean.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from feature_tables import make_data, schema
from one_training import Recipe, check_one_curve, losses_of, ranks_on, train_in_turn

from freescale.trace.metrics_log import read_metrics, step_of

SIDES = {
    "every occurrence": ("every", "false"),
    "unique rows": ("unique", "false"),
    "prioritized": ("unique", "true"),
}
HOT = ("album", "artist", "item")
LOSS_TOLERANCE = {"cpu": 1e-3, "cuda": 1e-2}
"""Relative: gradients of equal rows are added up in another order, and a negative that is its own target, which is left
out, is known by its place among unique rows: where every occurrence has its own place, it counts."""


def recipes(data: Path, options: argparse.Namespace) -> list[Recipe]:
    """Every side, round by round."""
    keys = (
        f"data.path={data}",
        f"data.global_tokens={options.tokens}",
        f"data.max_length={options.longest}",
        "data.workers=0",
        f"model.dim={options.dim}",
        f"model.layers={options.layers}",
        f"model.heads={options.heads}",
        f"model.dtype={'bfloat16' if options.device == 'cuda' else 'float32'}",
        "model.dropout=0",
        f"head.num_negatives={options.negatives}",
        "embedding.optimizer=rowwise_adagrad",
        "embedding.lr=0.01",
        f"run.device={options.device}",
        f"run.steps={options.steps}",
        "run.eval_every=0",
        "trace.kernels=false",
        "pipeline.decide_every=null",
        *options.keys,
    )
    return [
        Recipe((*keys, f"pipeline.prioritized={hides}"), rows=rows)
        for _ in range(options.rounds)
        for rows, hides in SIDES.values()
    ]


def read_run(folder: Path, options: argparse.Namespace, num_ranks: int) -> dict[str, Any]:
    """What one run moved and how long its steps took."""
    steps = read_metrics(folder / "metrics.jsonl").steps
    warm: list[Any] = [event for event in steps if (step_of(event) or 0) > options.warmup]
    tables: dict[str, Any] = {}
    for name in warm[0]["tables"]:
        of_steps = [event["tables"][name] for event in warm]
        tables[name] = {field: statistics.fmean(each[field] for each in of_steps) for field in of_steps[0]}
    for kind in ("exposed_bytes", "hidden_bytes"):
        whole = statistics.fmean(event[kind] for event in warm)
        assert abs(whole - sum(each[kind] for each in tables.values())) <= 1e-6 * whole + len(tables), kind
    served = [json.loads(folder.with_suffix(f".rank-{rank}").read_text()) for rank in range(num_ranks)]
    loads = {
        name: [statistics.fmean(rank[name][options.warmup :]) for rank in served]
        for name in HOT
        if name in served[0]
    }
    return {
        "ms": statistics.median(event["step_ms"] for event in warm),
        "tables": tables,
        # Every byte is counted by the rank that sends it and by the one that receives it.
        "exposed_mb": sum(each["exposed_bytes"] for each in tables.values()) / 2e6,
        "hidden_mb": sum(each["hidden_bytes"] for each in tables.values()) / 2e6,
        "rows": sum(each["rows"] for each in tables.values()),
        "busiest": {name: max(each) / statistics.fmean(each) for name, each in loads.items()},
        "served": loads,
        "losses": losses_of(steps),
    }


def measure(num_ranks: int, data: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All sides on one number of ranks, in turns."""
    with ranks_on(options.device, num_ranks) as environment, tempfile.TemporaryDirectory() as folder:
        done = train_in_turn(
            recipes(data, options), num_ranks=num_ranks, environment=environment, folder=Path(folder)
        )
        problems = [found for found in done.values() if isinstance(found, str)]
        if problems:
            raise SystemExit(f"FAILED: {problems[0]}")
        names = list(SIDES) * options.rounds
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
        for number, run in sorted(done.items()):
            assert isinstance(run, Path)
            found[names[number]].append(read_run(run, options, num_ranks))
    return found


def show(num_ranks: int, found: dict[str, list[dict[str, Any]]], worst: float) -> dict[str, Any]:
    """Two tables: the sides, and what each table sends."""
    print(f"\n{num_ranks} ranks; losses of all runs agree to {worst:.1e}")
    print(
        f"{'':18}{'ms a step':>10}{'(rounds)':>24}{'rows':>10}{'MB exposed':>12}{'hidden':>9}   busiest owner"
    )
    medians: dict[str, Any] = {}
    for name, runs in found.items():
        times = [run["ms"] for run in runs]
        first = runs[0]
        busiest = ", ".join(f"{table} {share:.2f}" for table, share in first["busiest"].items())
        rounds = " ".join(f"{ms:.1f}" for ms in times)
        print(
            f"{name:18}{statistics.median(times):10.1f}{rounds:>24}{first['rows']:10,.0f}"
            f"{first['exposed_mb']:12.1f}{first['hidden_mb']:9.1f}   {busiest}"
        )
        medians[name] = {**first, "ms": times, "losses": None}
    every, unique = (found[name][0]["tables"] for name in ("every occurrence", "unique rows"))
    print(f"{'table':22}{'occurrences':>12}{'unique':>10}{'share':>8}")
    for table in unique:
        before, after = every[table]["rows"], unique[table]["rows"]
        print(f"{table:22}{before:12,.0f}{after:10,.0f}{after / before:8.1%}")
    return medians


def main() -> None:
    """Numbers of ranks one after the other; tables, and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10, help="steps left out at the start of every run")
    parser.add_argument("--scale", type=int, default=100, help="rows of all tables are divided by it")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40_000, help="events a step over all ranks")
    parser.add_argument("--negatives", type=int, default=64)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--median", type=float, default=600.0, help="events of the median user")
    parser.add_argument("--longest", type=int, default=2663)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="changes to the workload")
    options = parser.parse_args()
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"num_users": options.users, "median": options.median, "longest": options.longest}
        data = make_data(Path(folder), options.scale, **sizes)
        rows = sum(each.get("rows", 0) for each in schema(options.scale).values())
        print(f"{rows:,} rows besides those of items, 1/{options.scale} of MLPerf's, {options.dim} wide")
        for num_ranks in options.ranks:
            found = measure(num_ranks, data, options)
            curves = [run["losses"] for runs in found.values() for run in runs]
            worst = check_one_curve(curves, tolerance=LOSS_TOLERANCE[options.device])
            answers[str(num_ranks)] = show(num_ranks, found, worst)
    facts = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": str(datetime.date.today()),
        "options": vars(options),
    }
    print(json.dumps({"claim": "dlrmv4_tables", "ranks": answers, **facts}))


if __name__ == "__main__":
    main()
