"""Steps of several ranks that share one GPU: replayed as CUDA graphs against computed as usual.

Whole runs of `freescale train --virtual-gpus N` in turns, on short histories with a long tail (workload B of
host_out_of_the_way.py). First the check: both ways follow one curve to the rounding of bfloat16, and nearly all batches
are replayed. Then the steps after the first ones: mean and median time, and the bubble in milliseconds by the accounts.
Sizes are recorded as they come, and on each rank others: by step 220 all have been.
Neither way is tried against plain communication in between (pipeline.decide_every=null): that is another claim.
--before names the root of an earlier checkout whose runs take turns with the others. Its own accounts counted gaps
between kernels as compute, so its bubble is what is left of its step without the compute of a usual step here.

    python benchmarks/captured_ranks.py [--ranks 4] [--rounds 3] [--steps 300] [--warm 220] [--before ROOT]
    python benchmarks/captured_ranks.py --device cpu --ranks 2 --steps 12 --warm 4 --rounds 1     # tries the code
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from host_out_of_the_way import ONE_GPU, WORKLOADS

QUIET = ("run.checkpoint_every=1000000", "pipeline.decide_every=null")
WAYS = {"usual": (*QUIET, "run.capture='off'"), "replayed": (*QUIET, "run.capture=auto")}
BEFORE = (*QUIET, "run.eval_every=1000000")
"""An earlier version knows no captured steps, and no 0 for "never"."""
SMALL = (
    "synthetic.users=400",
    "synthetic.items=200",
    "data.global_batch=16",
    "model.dim=16",
    "model.layers=1",
)


def train(way: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The steps of a run, as its metrics tell them."""
    with tempfile.TemporaryDirectory() as folder:
        out, on_gpu = Path(folder) / "run", options.device == "cuda"
        keys = [*ONE_GPU, *WORKLOADS["B"][1], *(() if on_gpu else SMALL), *WAYS.get(way, BEFORE)]
        keys += [
            f"run.device={options.device}",
            f"run.steps={options.steps}",
            f"run.out={out}",
            *options.keys,
        ]
        environment = {**os.environ, "PYTHONPATH": options.before} if way == "before" else None
        ranks = ["--virtual-gpus" if on_gpu else "--nproc", str(options.ranks)]
        command = [sys.executable, "-m", "freescale", "train", *ranks, *keys]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=options.before if environment else None,
        )
        if done.returncode:
            raise SystemExit(f"FAILED: {way}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        lines = (out / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "step"]


def check(usual: list[dict[str, Any]], replayed: list[dict[str, Any]], *, on_gpu: bool) -> float:
    """The largest difference of two curves, relative; refuses one that is no rounding."""
    worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(usual, replayed, strict=True))
    assert worst < 2e-2, f"FAILED: curves differ by {worst:.1e}"
    assert not on_gpu or replayed[-1]["captured"] > 0.9, f"FAILED: {replayed[-1]['captured']:.0%} replayed"
    return worst


def row_of(steps: list[dict[str, Any]]) -> dict[str, float]:
    """One round."""
    times = [step["step_ms"] for step in steps]
    return {
        "mean_ms": statistics.fmean(times),
        "median_ms": statistics.median(times),
        "bubble_ms": statistics.fmean(step["step_ms"] * (step.get("bubble") or 0.0) for step in steps),
        "captured": steps[-1].get("captured", 0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm", type=int, default=220)
    parser.add_argument("--before", metavar="ROOT", help="root of an earlier checkout to measure beside")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="changes to the recipe")
    options = parser.parse_args()
    ways = [*(["before"] if options.before else []), *WAYS]
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    worst = 0.0
    for number in range(options.rounds):
        runs = {way: train(way, options) for way in ways}
        worst = max(worst, check(runs["usual"], runs["replayed"], on_gpu=options.device == "cuda"))
        found = {way: row_of(steps[options.warm :]) for way, steps in runs.items()}
        if options.before:
            compute = found["usual"]["mean_ms"] - found["usual"]["bubble_ms"]
            found["before"]["bubble_ms"] = found["before"]["mean_ms"] - compute
        for way in ways:
            rounds[way].append(found[way])
            shown = "  ".join(f"{name} {value:.2f}" for name, value in rounds[way][-1].items())
            print(f"round {number + 1}  {way:<9} {shown}", flush=True)
    rows = {}
    print(f"{'':10}{'mean ms':>9}{'range':>16}{'median':>9}{'bubble ms':>11}{'replayed':>10}")
    for way, found in rounds.items():
        means = sorted(each["mean_ms"] for each in found)
        middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
        rows[way] = {**middle, "from": means[0], "to": means[-1]}
        span = f"{means[0]:.2f} - {means[-1]:.2f}"
        print(
            f"{way:<10}{middle['mean_ms']:>9.2f}{span:>16}{middle['median_ms']:>9.2f}"
            f"{middle['bubble_ms']:>11.2f}{middle['captured']:>10.0%}"
        )
    hardware = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    facts = {"hardware": hardware, "torch": torch.__version__, "date": str(datetime.date.today())}
    print(
        json.dumps({"claim": "captured_ranks", "ranks": options.ranks, "rows": rows, "worst": worst, **facts})
    )


if __name__ == "__main__":
    main()
