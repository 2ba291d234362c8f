r"""The simulator against real training: step time and bubble, predicted and measured, each feature on and off.

1. Profile: one rank of this machine (`freescale profile`), with the model and data of the runs; for ranks that share a
   GPU one of each number of them (`freescale profile --virtual-gpus N`).
2. Runs: `freescale train` on 2 and 4 ranks, balance and prioritized communication on and off, and both with weight
   gradients postponed, all on the same global batches; combinations take turns, round by round. Checked first: all
   have the same loss curve.
3. Predictions from the profile and the lengths of the very batches that were trained; the balancer of the runs plans
   with the profile's cost model, as the simulator does. Ranks beyond the cores share them.

    python benchmarks/simulate_validation.py                      # 2 and 4 CPU ranks, about 7 minutes
    python benchmarks/simulate_validation.py --virtual-gpus 2 4 8 --rounds 1 --profile-seconds 4 --steps 30 --keep OUT
    python benchmarks/simulate_validation.py --again OUT          # predict only, on any machine

With --keep, profiles and runs are written to that folder as they come; --again reads them and trains nothing.

`pure` rests on the profile alone. `calibrated` takes one number from the runs with everything off on the
same number of ranks: how much slower ranks compute beside each other (caches, memory, SM shares). It is never told a
bubble.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from one_training import check_one_curve
from validation_runs import (
    GPU_WORKLOAD,
    KEPT_OPTIONS,
    OPTIONS,
    WORKLOAD,
    Case,
    Outcome,
    Profiles,
    measured,
    profiles_of,
    read_runs,
    spread,
    train_all,
)

from freescale.balance.costs.cost_model import COEFFICIENTS
from freescale.balance.global_batches import GlobalBatches
from freescale.comm.world.ranks import Ranks
from freescale.recipe import Config, build_examples, build_sampler, build_source, load_config
from freescale.sim.answers.whatif import simulate_features
from freescale.sim.costs.plans import loads_of
from freescale.sim.costs.setting import Setting
from freescale.sim.inputs.cluster import load_cluster
from freescale.sim.inputs.profile import Profile
from freescale.sim.inputs.workload import Workload
from freescale.trace.bubbles import CAUSES

LOSS_TOLERANCE = {"cpu": 2e-3, "cuda": 1e-2}


def complete(cases: Sequence[Case]) -> list[Case]:
    """Those that were run and can be calibrated: by the run of as many ranks with everything off."""
    can = {case.ranks for case in cases if case.rounds and not case.balance and not case.prioritized}
    found = [case for case in cases if case.rounds and case.ranks in can]
    if not found:
        raise SystemExit("FAILED: no number of ranks was run with everything off")
    return found


@dataclass(frozen=True)
class Data:
    """What is trained: its keys, batches, and the rows of its table."""

    config: Config
    batches: GlobalBatches
    table_rows: int

    @classmethod
    def of(cls, config: Config) -> Data:
        """Made once: millions of events take their time."""
        source = build_source(config)
        one = Ranks(rank=0, num_ranks=1, device=torch.device("cpu"))
        sampler = build_sampler(config, build_examples(config, source, "train", negatives=True), one)
        return cls(config, sampler.batches, len(source.items.ids))


def predicted(
    case: Case, data: Data, profile: Profile, options: argparse.Namespace, *, slower: float = 1.0
) -> Outcome:
    """The same of the same batches."""
    config, batches = data.config, data.batches
    workload = Workload(
        samples_per_gpu=max(1, config.data.global_batch // case.ranks),
        ids_per_token=2.0,
        negatives=float(config.head.num_negatives),
        table_rows=data.table_rows,
        zipf=config.synthetic.zipf,
        row_bytes=int(profile.model["row_bytes"]),
        dense_bytes=4.0 * float(profile.model["dense_parameters"]),
    )
    times = {
        name: replace(timing, **{key: slower * getattr(timing, key) for key in COEFFICIENTS})
        for name, timing in profile.times.items()
    }
    setting = Setting(
        workload=workload,
        profile=replace(profile, times=times),
        cluster=load_cluster(options.cluster),
        jitter=None,
    )
    loads = loads_of(
        lambda step: batches.lengths[batches.batch(step)],
        num_ranks=case.ranks,
        num_steps=options.steps,
        balancer=case.features().balancer,
        cost_model=setting.cost_model(),
    )
    cores = cores_of(profile)
    made = simulate_features(
        setting,
        case.features(),
        num_ranks=case.ranks,
        num_steps=options.steps,
        loads=loads,
        cores=cores if profile.device == "cpu" and case.ranks > cores else None,
    )
    parts = made.outcome.accounts.parts(warmup=options.warmup)
    count = options.steps - options.warmup
    return Outcome(
        step_ms=1000 * parts.total / count,
        bubble=parts.bubble,
        causes={cause: getattr(parts, cause) / parts.total for cause in CAUSES},
        compute_ms=1000 * float(made.durations.compute[options.warmup :].mean()),
    )


def cores_of(profile: Profile) -> int:
    """Of the machine that was measured."""
    return int(str(profile.facts.get("cores") or os.cpu_count() or 1))


def rows_of(
    cases: Sequence[Case], data: Data, profiles: Profiles, options: argparse.Namespace
) -> list[dict[str, object]]:
    slower = {
        case.ranks: measured(case).compute_ms
        / predicted(case, data, profiles[case.ranks], options).compute_ms
        for case in cases
        if not case.balance and not case.prioritized
    }
    rows = []
    for case in cases:
        profile = profiles[case.ranks]
        # Ranks that share cores wait for them: that part of their compute the simulator knows already.
        shares_cores = profile.device == "cpu" and case.ranks > cores_of(profile)
        factor = slower[min(slower)] if shares_cores else slower[case.ranks]
        found = {
            "measured": measured(case),
            "pure": predicted(case, data, profile, options),
            "calibrated": predicted(case, data, profile, options, slower=factor),
        }
        row: dict[str, object] = {"case": case.name, "slower": slower[case.ranks]}
        row["rounds_ms"] = [one.step_ms for one in case.rounds]
        row["rounds_bubble"] = [one.bubble for one in case.rounds]
        for way, outcome in found.items():
            row |= {f"{way}_ms": outcome.step_ms, f"{way}_bubble": outcome.bubble}
            row |= {f"{way}_{cause}": share for cause, share in outcome.causes.items()}
            row[f"{way}_compute_ms"] = outcome.compute_ms
        rows.append(row)
    return rows


def summary(rows: Sequence[dict[str, object]], way: str) -> dict[str, float]:
    def value(row: dict[str, object], name: str) -> float:
        return float(str(row[name]))

    times = [abs(value(row, f"{way}_ms") / value(row, "measured_ms") - 1) for row in rows]
    points = [100 * abs(value(row, f"{way}_bubble") - value(row, "measured_bubble")) for row in rows]
    return {
        "step_error_median": statistics.median(times),
        "step_error_worst": max(times),
        "bubble_points_median": statistics.median(points),
        "bubble_points_worst": max(points),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument(
        "--virtual-gpus", type=int, nargs="*", default=[], help="ranks that share one GPU instead"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10, help="steps left out at the start of every run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--profile", default=None, help="a profile of this machine with these keys; measured unless given"
    )
    parser.add_argument(
        "--cluster", default=None, help="cluster of the ranks; cpu, or h200 with virtual GPUs"
    )
    parser.add_argument("--profile-seconds", type=float, default=45.0)
    parser.add_argument("--keep", type=Path, help="folder for the profiles and the runs")
    parser.add_argument("--again", type=Path, help="such a folder: nothing is measured, only predicted")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="changes to the workload")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        options.folder = options.again or options.keep or Path(name)
        if options.again:
            if not (options.again / OPTIONS).exists():
                parser.error(f"{options.again} was not made by --keep")
            options.__dict__.update(json.loads((options.again / OPTIONS).read_text()))
        validate(options)


def validate(options: argparse.Namespace) -> None:
    """Measure, unless that was done before; predict; compare."""
    options.device = "cuda" if options.virtual_gpus else "cpu"
    options.cluster = options.cluster or ("h200" if options.virtual_gpus else "cpu")
    options.workload = (*WORKLOAD, *(GPU_WORKLOAD if options.virtual_gpus else ()), *options.keys)
    began = time.monotonic()
    config = load_config(None, options.workload)
    if not options.again:
        options.folder.mkdir(parents=True, exist_ok=True)
        if (options.folder / OPTIONS).exists():
            raise SystemExit(
                f"FAILED: {options.folder} has runs already; --again {options.folder} reads them"
            )
        kept = {key: getattr(options, key) for key in KEPT_OPTIONS}
        (options.folder / OPTIONS).write_text(json.dumps(kept))
    profiles = profiles_of(config, options)
    wanted = [
        Case(count, balance, hides, postpone, sm_free=options.device == "cuda")
        for count in profiles
        for balance, hides, postpone in (
            (False, False, False),
            (False, True, False),
            (True, False, False),
            (True, True, False),
            (True, True, True),
        )
    ]
    if not options.again:
        train_all(wanted, profiles, options)
    read_runs(wanted, options)
    cases = complete(wanted)
    missing = [case.name for case in wanted if case not in cases]
    curves = [curve for case in cases for curve in case.curves]
    worst = check_one_curve(curves, tolerance=LOSS_TOLERANCE[options.device])
    rows = rows_of(cases, Data.of(config), profiles, options)
    hardware = next(iter(profiles.values())).hardware
    print_rows(rows, worst, hardware)
    results = {way: summary(rows, way) for way in ("pure", "calibrated")}
    for way, errors in results.items():
        print(
            f"{way}: step time off by {errors['step_error_median']:.1%} (median), "
            f"{errors['step_error_worst']:.1%} (worst); "
            f"bubble by {errors['bubble_points_median']:.1f} and {errors['bubble_points_worst']:.1f} points"
        )
    apart = spread(cases)
    print(
        f"rounds of one case are off their own median by {apart['step_spread_median']:.1%} (median), "
        f"{apart['step_spread_worst']:.1%} (worst); bubble by {apart['bubble_points_median']:.1f} and "
        f"{apart['bubble_points_worst']:.1f} points"
    )
    for name in missing:
        print(f"left out, not run or not comparable: {name}")
    facts = {
        "hardware": hardware,
        "profiles": [profile.facts for profile in profiles.values()],
        "date": str(datetime.date.today()),
        "seconds": time.monotonic() - began,
        "left_out": missing,
    }
    print(
        json.dumps(
            {"claim": "simulate_validation", "errors": results, "spread": apart, "rows": rows, **facts}
        )
    )
    if missing:
        sys.exit(1)


def print_rows(rows: Sequence[dict[str, object]], worst: float, hardware: str) -> None:
    print(f"Predicted from a profile of {hardware}; losses of all runs agree to {worst:.1e}.\n")
    print(
        f"{'':<40}{'step ms':>9}{'rounds':>16}{'pure':>8}{'calibr.':>8}   "
        f"{'bubble':>7}{'rounds':>14}{'pure':>8}{'calibr.':>8}"
    )
    for row in rows:

        def value(name: str, row: dict[str, object] = row) -> float:
            return float(str(row[name]))

        print(
            f"{row['case']!s:<40}{value('measured_ms'):>9.1f}{_range(row['rounds_ms'], '.1f'):>16}"
            f"{value('pure_ms'):>8.1f}{value('calibrated_ms'):>8.1f}   {value('measured_bubble'):>7.1%}"
            f"{_range(row['rounds_bubble'], '.1%'):>14}{value('pure_bubble'):>8.1%}{value('calibrated_bubble'):>8.1%}"
        )


def _range(rounds: object, form: str) -> str:
    """From the least to the most of some rounds."""
    assert isinstance(rounds, list)
    return f"{min(rounds):{form}} to {max(rounds):{form}}".replace("% to", " to")


if __name__ == "__main__":
    main()
