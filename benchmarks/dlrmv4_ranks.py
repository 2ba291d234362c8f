r"""DLRMv4 on its twin on several ranks: one curve, what balance and priority change, and whom hot ids load.

    PYTHONPATH=. python benchmarks/dlrmv4_ranks.py                                  # 2, 4 and 8 virtual GPUs of one GPU
    PYTHONPATH=. python benchmarks/dlrmv4_ranks.py --device cpu --ranks 2 4 --steps 6 --warmup 2

recipes/mlperf_twin.yaml as it is on a GPU, in bfloat16; on CPU ranks in float64 and in small: 300 listeners, a tenth of
the lengths, width 16. One rank alone first, then each number of ranks in turns

    all on             balanced by cost, rows that have time travel under compute
    plain rows         the same, every row when it is asked for
    not balanced       samples dealt in turn
    hot items dealt    plain rows, those of the most popular items dealt evenly to their owners (embedding.spread_hot)
    every occurrence   an id, a row and a gradient for every event: no deduplication

Checked: losses of all runs are one curve (float64: 1e-9; bfloat16: 1e-2), and those of "all on" and "plain rows" are
the same bits. Told: bubble and its parts as training reports them, work of the busiest rank over the mean, MB a step,
and of every table what its busiest owner serves over the mean. Bubbles of CPU ranks that share cores tell nothing about
GPUs.
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
import yaml
from one_training import Recipe, check_one_curve, losses_of, ranks_on, train_in_turn

from freescale.pipeline import busiest_owner
from freescale.trace.metrics_log import read_metrics, step_of

RECIPE = Path(__file__).parent.parent / "recipes" / "mlperf_twin.yaml"
SMALL = (
    *("data.scale=0.0003", "data.length_scale=0.1", "data.global_batch=32", "data.max_length=409"),
    *("head.anchor_history=400", "head.pool_events=136", "head.pool_window=2000", "head.hidden=16"),
    *("model.dim=16", "model.heads=2", "model.layers=2", "model.dtype=float64", "model.scale_length=409"),
    "tokens.hidden=16",
)
SIDES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "all on": (None, ()),
    "plain rows": ("unique", ("pipeline.prioritized=false",)),
    "not balanced": (None, ("balance.enabled=false",)),
    "hot items dealt": ("unique", ("embedding.spread_hot=1000", "pipeline.prioritized=false")),
    "every occurrence": ("every", ("pipeline.prioritized=false",)),
}
TOLERANCE = {"cpu": 1e-9, "cuda": 1e-2}
SHARES = ("bubble", "straggler", "comm", "host")


def keys_of(recipe: Path) -> list[str]:
    """A recipe as one would type it, without its section run."""
    sections = yaml.safe_load(recipe.read_text())
    return [
        f"{section}.{key}={yaml.safe_dump(value, default_flow_style=True, width=10_000).splitlines()[0]}"
        for section, keys in sections.items()
        for key, value in keys.items()
        if section != "run"
    ]


def recipe_of(side: str, options: argparse.Namespace) -> Recipe:
    """One run."""
    rows, change = SIDES[side]
    keys = (
        *keys_of(RECIPE),
        *(SMALL if options.device == "cpu" else ()),
        f"run.device={options.device}",
        f"run.steps={options.steps}",
        "run.eval_every=0",
        # What is decided by measured time would deal samples otherwise in every run, and bits with them.
        *("pipeline.decide_every=null", "balance.refit_every=null"),
        *options.keys,
        *change,
    )
    return Recipe(keys, rows=rows)


def read_run(folder: Path, options: argparse.Namespace, num_ranks: int) -> dict[str, Any]:
    """What one run learnt, moved, and waited for."""
    steps = read_metrics(folder / "metrics.jsonl").steps
    warm: list[Any] = [event for event in steps if (step_of(event) or 0) > options.warmup]
    counted = [folder.with_suffix(f".rank-{rank}") for rank in range(num_ranks)]
    served = [json.loads(each.read_text()) for each in counted if each.exists()]
    loads = {
        name: [statistics.fmean(rank[name][options.warmup :]) for rank in served]
        for name in (served[0] if served else ())
    }
    return {
        "losses": losses_of(steps),
        "ms": statistics.median(event["step_ms"] for event in warm),
        "tokens": statistics.fmean(event["tokens_per_s"] * event["step_ms"] / 1000 for event in warm),
        **{name: statistics.fmean(event[name] for event in warm) for name in SHARES},
        "imbalance": statistics.fmean(event["imbalance"] for event in warm),
        # Every byte is counted by the rank that sends it and by the one that receives it.
        "exposed_mb": statistics.fmean(event.get("exposed_bytes", 0) for event in warm) / 2e6,
        "hidden_mb": statistics.fmean(event.get("hidden_bytes", 0) for event in warm) / 2e6,
        "served": {name: sum(each) for name, each in loads.items()},
        "busiest": {name: busiest_owner(each) for name, each in loads.items()},
    }


def measure(num_ranks: int, sides: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """These sides on one number of ranks, in turns."""
    with ranks_on(options.device, num_ranks) as environment, tempfile.TemporaryDirectory() as folder:
        done = train_in_turn(
            [recipe_of(side, options) for side in sides],
            num_ranks=num_ranks,
            environment=environment,
            folder=Path(folder),
        )
        problems = [found for found in done.values() if isinstance(found, str)]
        if problems or len(done) < len(sides):
            raise SystemExit(f"FAILED: {problems[0] if problems else 'not all runs came to their end'}")
        return {side: read_run(Path(done[number]), options, num_ranks) for number, side in enumerate(sides)}


def show(num_ranks: int, found: dict[str, dict[str, Any]], worst: float) -> None:
    """A table of the sides, and one of the owners."""
    print(f"\n{num_ranks} ranks: losses at most {worst:.1e} off those of one rank", flush=True)
    print(
        f"{'':18}{'ms':>9}{'bubble':>8}{'straggler':>10}{'comm':>7}{'host':>7}{'imbalance':>10}"
        f"{'MB exposed':>11}{'hidden':>8}"
    )
    for side, run in found.items():
        print(
            f"{side:18}{run['ms']:9.1f}{run['bubble']:8.1%}{run['straggler']:10.1%}{run['comm']:7.1%}"
            f"{run['host']:7.1%}{run['imbalance']:10.3f}{run['exposed_mb']:11.2f}{run['hidden_mb']:8.2f}"
        )
    names = [side for side in ("every occurrence", "plain rows", "hot items dealt") if side in found]
    print(f"{'busiest owner / mean':22}" + "".join(f"{name:>18}" for name in names) + "   rows served a step")
    for table in found[names[0]]["busiest"]:
        shares = "".join(f"{found[name]['busiest'][table]:18.3f}" for name in names)
        rows = ", ".join(f"{found[name]['served'][table]:,.0f}" for name in names)
        print(f"{table:22}{shares}   {rows}")


def main() -> None:
    """One rank, then numbers of ranks; tables, and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10, help="steps left out of times at the start")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="changes to the workload")
    options = parser.parse_args()
    alone = measure(1, [options.sides[0]], options)[options.sides[0]]
    print(f"1 rank: {alone['ms']:.1f} ms a step of {alone['tokens']:,.0f} tokens", flush=True)
    answer: dict[str, Any] = {"1": {"alone": alone}}
    for num_ranks in options.ranks:
        found = measure(num_ranks, options.sides, options)
        curves = [alone["losses"], *(run["losses"] for run in found.values())]
        worst = check_one_curve(curves, tolerance=TOLERANCE[options.device])
        show(num_ranks, found, worst)
        answer[str(num_ranks)] = {"worst": worst, **found}
        bits = [found[side]["losses"] for side in ("all on", "plain rows") if side in found]
        if len(bits) == 2:
            same = bits[0] == bits[1]
            print(f"losses of all on and plain rows are the same bits: {'yes' if same else 'NO'}", flush=True)
            answer[str(num_ranks)]["same_bits"] = same
    facts = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": str(datetime.date.today()),
        "options": vars(options),
    }
    print(json.dumps({"claim": "dlrmv4_ranks", "ranks": answer, **facts}))
    if not all(each.get("same_bits", True) for each in answer.values()):
        raise SystemExit("FAILED: priority changes bits")


if __name__ == "__main__":
    main()
