r"""The headline: how much of the bubble balance, prioritized communication and SM-free transport take away.

The same HSTU training (same seed, same global batches, long-tailed lengths) on N ranks, with every combination of the
three switches. Combinations take turns, round by round, in a new order each round. Checked first: all combinations have
the same loss curve. A switch that this version or this machine does not have is listed with the reason, and its
combinations are not run.

    python benchmarks/bubble_reduction.py --ranks 2
    python benchmarks/bubble_reduction.py --virtual-gpus 8 --sm-free host_staged --baseline-transport collective \
        run.device=cuda model.dim=256 model.layers=4 embedding.rows=20000000 embedding.id_map=hash

Reduction is 1 - bubble after / bubble before, with everything off as "before".
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from one_training import LONG_TAILED, check_one_curve, losses_of, warm_account

from freescale.errors import FreeScaleError
from freescale.recipe import load_config
from freescale.trace.bubbles import CAUSES
from freescale.trace.metrics_log import Event, read_metrics

WORKLOAD = (
    *LONG_TAILED,
    "synthetic.users=3000",
    "synthetic.items=20000",
    "model.dropout=0",
    "eval.max_users=64",
    "run.log_every=10",
    "balance.refit_every=20",
)
LOSS_TOLERANCE = 2e-3
"""Relative; float32 sums in another order drift apart by about 1e-4 in a hundred steps."""


@dataclass(frozen=True)
class Switch:
    """One of the three ideas: the recipe keys that turn it on and off, and why it cannot be, if so."""

    name: str
    on: str
    off: str
    missing: str = ""


@dataclass
class Combination:
    """The switches of a run and what its rounds gave."""

    switches: dict[str, bool]
    keys: list[str]
    steps: list[list[Event]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The switches that are on."""
        return " + ".join(name for name, on in self.switches.items() if on) or "all off"


def find_switches(options: argparse.Namespace) -> list[Switch]:
    """The three switches, with a reason beside each that cannot be used here."""
    balance = Switch("balance", "balance.enabled=true", "balance.enabled=false")
    # The choice between the two ways is the benchmark's here, not the run's own.
    fixed = " pipeline.decide_every=null" if has_key("pipeline.decide_every=null") else ""
    has_pipeline = importlib.util.find_spec("freescale.pipeline.prioritized") is not None
    prioritized = Switch(
        "prioritized",
        f"pipeline.prioritized=true{fixed}",
        f"pipeline.prioritized=false{fixed}",
        "" if has_pipeline else "this version has the plain schedule only",
    )
    sm_free = Switch(
        "SM-free",
        f"comm.transport={options.sm_free}",
        f"comm.transport={options.baseline_transport}",
        transport_missing(options),
    )
    return [balance, prioritized, sm_free]


def transport_missing(options: argparse.Namespace) -> str:
    """Why the SM-free transport cannot be used, or nothing: first its name, then a run of two steps."""
    if not has_key(f"comm.transport={options.sm_free}"):
        return f"this version has no comm.transport={options.sm_free}"
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"comm.transport={options.sm_free}", "run.steps=2"]
        tried = start_run(folder, keys, options)
    return "" if tried.returncode == 0 else _last_line(tried.stderr)


def has_key(text: str) -> bool:
    """Whether this version takes a recipe key with that value."""
    try:
        load_config(None, [text])
    except FreeScaleError:
        return False
    return True


def start_run(
    folder: str, keys: Sequence[str], options: argparse.Namespace
) -> subprocess.CompletedProcess[str]:
    """One training run with `freescale train`, as a user would start it."""
    ranks = (
        ["--virtual-gpus", str(options.virtual_gpus)]
        if options.virtual_gpus
        else ["--nproc", str(options.ranks)]
    )
    command = [sys.executable, "-m", "freescale", "train", *ranks, "--resume", "never"]
    recipe = [*WORKLOAD, "run.eval_every=1000000", *options.keys, *keys, f"run.out={folder}"]
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([*command, *recipe], capture_output=True, text=True, env=environment, check=False)


def measure(combination: Combination, options: argparse.Namespace) -> None:
    """Train once with a combination and keep its step lines."""
    with tempfile.TemporaryDirectory() as folder:
        done = start_run(folder, [*combination.keys, f"run.steps={options.steps}"], options)
        if done.returncode:
            raise SystemExit(f"FAILED with {combination.name}:\n{done.stderr[-2000:]}")
        steps = read_metrics(Path(folder) / "metrics.jsonl").steps
    if len(steps) != options.steps or any(event.get("bubble") is None for event in steps):
        raise SystemExit(f"FAILED with {combination.name}: {len(steps)} steps, or steps without a breakdown")
    combination.steps.append(steps)


def summary(combination: Combination, warmup: int) -> dict[str, float]:
    """Medians over the rounds; each round is the time-weighted mean of its steps after the warm-up."""
    accounts = [warm_account(steps, warmup=warmup) for steps in combination.steps]
    row = {"step_ms": statistics.median(one.step_ms for one in accounts)}
    row |= {cause: statistics.median(one.shares[cause] for one in accounts) for cause in CAUSES}
    bubbles = [one.bubble for one in accounts]
    return row | {
        "bubble": statistics.median(bubbles),
        "bubble_min": min(bubbles),
        "bubble_max": max(bubbles),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of `freescale train --nproc`")
    parser.add_argument("--virtual-gpus", type=int, default=0, help="ranks that share one GPU instead")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=20, help="steps left out at the start of every run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sm-free", default="host_staged", help="comm.transport of the SM-free side")
    parser.add_argument("--baseline-transport", default="auto", help="comm.transport of the other side")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="changes to the workload")
    options = parser.parse_args()
    switches = find_switches(options)
    usable = [switch for switch in switches if not switch.missing]
    combinations = [
        Combination(
            dict(zip((switch.name for switch in usable), chosen)),
            [key for switch, on in zip(usable, chosen) for key in (switch.on if on else switch.off).split()],
        )
        for chosen in itertools.product((False, True), repeat=len(usable))
    ]
    order = random.Random(0)
    for turn in range(options.rounds):
        for combination in order.sample(combinations, len(combinations)):
            measure(combination, options)
            print(f"round {turn + 1}: {combination.name}", file=sys.stderr)
    curves = [losses_of(steps) for combination in combinations for steps in combination.steps]
    worst = check_one_curve(curves, tolerance=LOSS_TOLERANCE)
    rows = [{"combination": one.name, **summary(one, options.warmup)} for one in combinations]
    print_table(rows, switches, options, worst)
    facts = {
        "ranks": options.virtual_gpus or options.ranks,
        "virtual_gpus": bool(options.virtual_gpus),
        "hardware": _hardware(),
        "torch": torch.__version__,
        "date": str(datetime.date.today()),
    }
    missing = {switch.name: switch.missing for switch in switches if switch.missing}
    print(json.dumps({"claim": "bubble_reduction", "rows": rows, "not_available": missing, **facts}))


def print_table(
    rows: Sequence[dict[str, object]], switches: Sequence[Switch], options: argparse.Namespace, worst: float
) -> None:
    """One line a combination; `reduction` is added to each row."""
    before = float(str(rows[0]["bubble"]))
    ranks = options.virtual_gpus or options.ranks
    print(
        f"HSTU on {ranks} ranks, {options.rounds} rounds of {options.steps} steps, {options.warmup} left out;"
    )
    print(f"losses of all runs agree to {worst:.1e}. Shares of the step, medians of the rounds.\n")
    names = ("step ms", "bubble", "straggler", "comm", "host", "reduction", "bubble, range")
    print(f"{'':<32}" + "".join(f"{name:>11}" for name in names[:-1]) + f"   {names[-1]}")
    for row in rows:
        share = {name: float(str(value)) for name, value in row.items() if name != "combination"}
        row["reduction"] = 1 - share["bubble"] / before if before else 0.0
        cells = [f"{share['step_ms']:11.1f}"]
        cells += [f"{share[name]:11.1%}" for name in ("bubble", *CAUSES)]
        cells += [
            f"{float(str(row['reduction'])):11.1%}",
            f"   {share['bubble_min']:.1%}-{share['bubble_max']:.1%}",
        ]
        print(f"{row['combination']!s:<32}" + "".join(cells))
    for switch in switches:
        if switch.missing:
            print(f"not available here: {switch.name} ({switch.missing}); its combinations were not run")


def _hardware() -> str:
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{platform.machine()}, {os.cpu_count()} cores{gpu}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "the run failed without a message"


if __name__ == "__main__":
    main()
