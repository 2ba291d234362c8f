"""What `simulate_validation.py` measures: profiles and runs of all combinations, in a folder that can be read again."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from one_training import LONG_TAILED, Recipe, losses_of, ranks_on, train_in_turn, warm_account

from freescale.recipe import Config
from freescale.sim.costs.setting import Features
from freescale.sim.inputs.profile import Profile, cost_model_of, load_profile
from freescale.trace.bubbles import CAUSES
from freescale.trace.metrics_log import read_metrics
from freescale.trace.span_file import read_spans

WORKLOAD = (
    *LONG_TAILED,
    "synthetic.users=1500",
    "synthetic.items=20000",
    "model.dropout=0",
    "eval.max_users=8",
    "run.log_every=40",
    "run.eval_every=1000000",
    "balance.refit_every=null",
    "pipeline.decide_every=null",
)
# On a GPU: enough work that the host keeps ahead of 2 ranks, and the same for 4 and 8.
GPU_WORKLOAD = (
    "synthetic.users=1200",
    "synthetic.items=200000",
    "synthetic.mean_length=1000",
    "synthetic.max_length=8192",
    "data.max_length=8192",
    "data.global_batch=192",
    "model.dim=512",
    "model.layers=4",
    "model.heads=4",
    "model.dtype=bfloat16",
    "head.num_negatives=128",
    "embedding.optimizer=rowwise_adagrad",
    "run.device=cuda",
)
ORDER = "order.json"
OPTIONS = "options.json"
KEPT_OPTIONS = ("ranks", "virtual_gpus", "steps", "warmup", "cluster", "keys")


@dataclass(frozen=True)
class Outcome:
    """A run, or what was predicted of it: milliseconds of a step and of its compute, shares of the step."""

    step_ms: float
    bubble: float
    causes: dict[str, float]
    compute_ms: float


@dataclass
class Case:
    """One combination on one number of ranks, and what its rounds measured: outcomes and losses."""

    ranks: int
    balance: bool
    prioritized: bool
    postpone: bool = False
    sm_free: bool = False
    rounds: list[Outcome] = field(default_factory=list)
    curves: list[list[float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Ranks and what is on."""
        parts = ["balance"] * self.balance + ["prioritized"] * self.prioritized + ["postpone"] * self.postpone
        return f"{self.ranks} ranks, {' + '.join(parts) or 'all off'}"

    def features(self) -> Features:
        """The same for the simulator."""
        return Features(
            balancer="freescale" if self.balance else "random",
            prioritized=self.prioritized,
            sm_free=self.sm_free,
            postpone=self.postpone,
        )


Profiles = Mapping[int, Profile]


def profiles_of(config: Config, options: argparse.Namespace) -> Profiles:
    """One for all numbers of CPU ranks, or one for each number of ranks that share a GPU."""
    counts = options.virtual_gpus or options.ranks
    if options.profile:
        return dict.fromkeys(counts, load_profile(options.profile))
    if options.again:
        return {count: load_profile(str(profile_file(options, count))) for count in counts}
    if not options.virtual_gpus:
        return dict.fromkeys(counts, measure(config, options))
    return {count: measure(config, options, virtual_gpus=count) for count in counts}


def measure(config: Config, options: argparse.Namespace, *, virtual_gpus: int = 0) -> Profile:
    from freescale.profiling.measure import measure_profile

    profile = measure_profile(
        config,
        device=options.device,
        seconds=options.profile_seconds,
        most_samples=max(2, config.data.global_batch // (virtual_gpus or 2)),
        virtual_gpus=virtual_gpus,
        command=" ".join(sys.argv),
        say=lambda text: print(f"measuring {text}", file=sys.stderr),
    )
    profile_file(options, virtual_gpus).write_text(profile.to_json())
    return profile


def profile_file(options: argparse.Namespace, count: int) -> Path:
    """Where the profile of so many ranks is kept; CPU ranks have one for all."""
    return Path(options.folder) / f"profile-{options.device}-{count if options.virtual_gpus else 1}.json"


def recipe_of(case: Case, options: argparse.Namespace, cost_model: Path) -> Recipe:
    """The workload with one combination."""
    return Recipe(
        (
            *options.workload,
            f"balance.enabled={str(case.balance).lower()}",
            f"pipeline.prioritized={str(case.prioritized).lower()}",
            f"pipeline.postpone={'on' if case.postpone else 'off'}",
            f"balance.cost_model={cost_model}",
            f"run.steps={options.steps}",
        )
    )


def train_all(cases: Sequence[Case], profiles: Profiles, options: argparse.Namespace) -> None:
    """All combinations of each number of ranks take turns, in an order that chance decides."""
    chance = random.Random(0)
    for num_ranks in sorted({case.ranks for case in cases}):
        mine = [case for case in cases if case.ranks == num_ranks]
        order = [case for _ in range(options.rounds) for case in chance.sample(mine, len(mine))]
        folder = options.folder / f"runs-{num_ranks}"
        folder.mkdir()
        (folder / ORDER).write_text(json.dumps([case.name for case in order]))
        cost_model = folder / "cost_model.json"
        cost_model_of(profiles[num_ranks].times).save(cost_model)
        recipes = [recipe_of(case, options, cost_model) for case in order]
        with ranks_on(options.device, num_ranks) as environment:
            found = train_in_turn(recipes, num_ranks=num_ranks, environment=environment, folder=folder)
        done = [number for number, made in found.items() if isinstance(made, Path)]
        for number in found.keys() - set(done):
            print(f"{order[number].name}: {found[number]}", file=sys.stderr)
        print(f"{num_ranks} ranks: {len(done)} of {len(order)} runs", file=sys.stderr)
        if len(found) < len(order):
            return  # Ctrl-C: what is there counts


def read_runs(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """What the runs in the folder measured, case by case."""
    by_name = {case.name: case for case in cases}
    for file in sorted(options.folder.glob(f"runs-*/{ORDER}")):
        for number, name in enumerate(json.loads(file.read_text())):
            run = file.parent / str(number)
            if (run / "trained").exists():
                read_run(by_name[name], run, options)


def read_run(case: Case, folder: Path, options: argparse.Namespace) -> None:
    """What a run measured after the warm-up, and its losses."""
    steps, spans = read_metrics(folder / "metrics.jsonl").steps, read_spans(folder)
    if len(steps) != options.steps or any(event.get("bubble") is None for event in steps):
        raise SystemExit(f"FAILED with {case.name}: steps are missing or have no breakdown")
    account = warm_account(steps, warmup=options.warmup)
    compute = [
        span.end - span.start
        for rank in spans.ranks
        for kept in rank.steps.values()
        if kept.step > options.warmup
        for span in kept.spans
        if span.name == "forward and backward" and span.step == kept.step
    ]
    causes = {cause: account.shares[cause] for cause in CAUSES}
    case.rounds.append(Outcome(account.step_ms, account.bubble, causes, 1000 * statistics.fmean(compute)))
    case.curves.append(losses_of(steps))


def measured(case: Case) -> Outcome:
    """Medians over the rounds."""
    median = statistics.median
    return Outcome(
        step_ms=median(one.step_ms for one in case.rounds),
        bubble=median(one.bubble for one in case.rounds),
        causes={cause: median(one.causes[cause] for one in case.rounds) for cause in CAUSES},
        compute_ms=median(one.compute_ms for one in case.rounds),
    )


def spread(cases: Sequence[Case]) -> dict[str, float]:
    """How far rounds of one case lie from their own median: no prediction can be held against less."""
    times, points = [], []
    for case in cases:
        middle = measured(case)
        times += [abs(one.step_ms / middle.step_ms - 1) for one in case.rounds]
        points += [100 * abs(one.bubble - middle.bubble) for one in case.rounds]
    return {
        "step_spread_median": statistics.median(times),
        "step_spread_worst": max(times),
        "bubble_points_median": statistics.median(points),
        "bubble_points_worst": max(points),
    }
