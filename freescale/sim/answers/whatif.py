"""Predictions: one setting, some features, a number of GPUs in; step time, bubble, limit and price out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from freescale.sim.costs.durations import Durations, measure_out
from freescale.sim.costs.links import Links
from freescale.sim.costs.node_hops import can_hop
from freescale.sim.costs.plans import Loads, plan_loads
from freescale.sim.costs.rank_links import links_of
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.costs.shared_gpu import measure_out_shared
from freescale.sim.engine.accounts import Record
from freescale.sim.engine.engine import Outcome, simulate
from freescale.sim.engine.schedules import plain, prioritized, split
from freescale.sim.engine.stages import Program
from freescale.trace import CAUSES

# The first steps fill the pipeline and say nothing about the others.
WARMUP = 4
# Below this share of a step nothing but the compute itself is worth naming as the limit.
_NOTABLE = 0.03

EVERYTHING = Features(even_owners=True, postpone=True)
_NOTHING = replace(
    EVERYTHING, prioritized=False, dedup=False, sm_free=False, even_owners=False, postpone=False
)
BASELINE = replace(_NOTHING, balancer="random")
LADDER = (
    BASELINE,
    replace(_NOTHING, balancer="kk_equal"),
    _NOTHING,
    replace(_NOTHING, prioritized=True),
    replace(_NOTHING, prioritized=True, dedup=True),
    replace(EVERYTHING, even_owners=False, postpone=False),
    replace(EVERYTHING, postpone=False),
    EVERYTHING,
)
"""One idea after the other."""

ABLATION = (
    replace(EVERYTHING, balancer="random"),
    replace(EVERYTHING, prioritized=False),
    replace(EVERYTHING, dedup=False),
    replace(EVERYTHING, sm_free=False),
    replace(EVERYTHING, even_owners=False),
    replace(EVERYTHING, postpone=False),
)
"""Everything but one."""


def as_shipped(setting: Setting, features: Features, num_ranks: int) -> Features:
    """The same without what has not run on so many GPUs, or what the profile does not know; `answer.py` says so."""
    sm_free = features.sm_free
    if setting.profile.device != "cpu":
        sm_free = setting.is_sm_free(features, num_ranks)
    has_links = setting.profile.device == "cpu" or setting.profile.shared_by > 1
    by_node = features.node_dedup and features.dedup and not has_links and can_hop(setting.cluster, num_ranks)
    postpone = features.postpone and setting.knows_weights
    return replace(features, sm_free=sm_free, postpone=postpone, node_dedup=by_node)


def unique_features(setting: Setting, combinations: Sequence[Features], num_ranks: int) -> list[Features]:
    """Combinations as they are on so many GPUs, each once; the last one stays last."""
    found = [as_shipped(setting, one, num_ranks) for one in combinations]
    return list(dict.fromkeys(one for one in found if one != found[-1])) + found[-1:]


@dataclass(frozen=True)
class Failures:
    """GPUs fail now and then, and the run goes on from its last checkpoint.

    Args:
        mtbf_hours: mean time between failures of one GPU with its share of the node.
        restart_minutes: from a failure to the first step after it.
        checkpoint_minutes: between checkpoints; half of it is computed again.
    """

    mtbf_hours: float
    restart_minutes: float = 10.0
    checkpoint_minutes: float = 30.0

    def useful_share(self, num_gpus: int) -> float:
        """Share of the time that is not lost to failures."""
        lost_minutes = self.restart_minutes + self.checkpoint_minutes / 2
        return 1.0 / (1.0 + num_gpus * lost_minutes / 60 / self.mtbf_hours)


@dataclass(frozen=True)
class Prediction:
    """One row of the table. Shares are of the step.

    Args:
        gpus: ranks.
        features: what is on.
        step_ms: mean time of a step.
        tokens_per_s: of all ranks, failures included.
        efficiency: tokens/s of a GPU over those of one GPU alone.
        bubble: as `trace.bubbles` defines it; `straggler`, `comm` and `host` add up to it.
        contention: compute time lost to transfers beside it; part of the compute, not of the bubble.
        lost: bubble and contention together.
        bound: idle share that no assignment of samples avoids.
        planned: idle share of the plans by predicted cost.
        limit: what to improve first, in words.
        cost_per_billion: dollars for 10^9 tokens.
        exposed_mb: sent and received by a rank while it stands still.
        hidden_mb: the same under compute.
        network_mb: of both, to and from ranks of other nodes.
        busiest_owner: what the busiest owner of rows sends, over the mean of all.
    """

    gpus: int
    features: Features
    step_ms: float
    tokens_per_s: float
    efficiency: float
    bubble: float
    straggler: float
    comm: float
    host: float
    contention: float
    lost: float
    bound: float
    planned: float
    limit: str
    cost_per_billion: float
    exposed_mb: float
    hidden_mb: float
    network_mb: float
    busiest_owner: float

    def as_row(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "name": self.features.words()}


@dataclass(frozen=True, eq=False)
class Simulated:
    """A prediction with what it was made of, for timelines and tests."""

    features: Features
    program: Program
    durations: Durations
    loads: Loads
    outcome: Outcome


def simulate_features(
    setting: Setting,
    features: Features,
    *,
    num_ranks: int,
    num_steps: int = 200,
    plan_steps: int = 32,
    cores: int | None = None,
    loads: Loads | None = None,
    observe: Callable[[int, Record], None] | None = None,
) -> Simulated:
    """Plan some global batches, measure every stage out, run the schedule.

    Args:
        setting: workload, profile, cluster.
        features: what is on.
        num_ranks: GPUs.
        num_steps: steps to simulate.
        plan_steps: different global batches; they come again in turn, with other jitter.
        cores: see `engine.simulate`.
        loads: plans, where they are known.
        observe: see `engine.simulate`.
    """
    if loads is None:
        loads = plan(setting, features, num_ranks=num_ranks, plan_steps=min(plan_steps, num_steps))
    measure = measure_out_shared if setting.profile.shared_by > 1 else measure_out
    durations = measure(setting, loads, features, num_ranks=num_ranks, num_steps=num_steps)
    hides, on_gpus = features.prioritized and num_ranks > 1, setting.profile.device != "cpu"
    if hides and features.postpone:
        program = split(durations, late=on_gpus)
    elif hides:
        program = prioritized(durations, rows_first=on_gpus)
    else:
        program = plain(durations, rows_first=on_gpus)
    outcome = simulate(program, num_ranks=num_ranks, num_steps=num_steps, cores=cores, observe=observe)
    return Simulated(features, program, durations, loads, outcome)


def plan(setting: Setting, features: Features, *, num_ranks: int, plan_steps: int) -> Loads:
    """The plans of some global batches; a balancer that measures speeds knows them."""
    return plan_loads(
        setting.workload,
        num_ranks=num_ranks,
        num_steps=plan_steps,
        balancer=features.balancer,
        cost_model=setting.cost_model(),
        window=features.window,
        max_tokens_ratio=features.token_cap,
        speeds=setting.speeds(num_ranks) if features.balancer == "freescale" else None,
        seed=setting.seed,
    )


def predict(
    setting: Setting,
    features: Features,
    *,
    num_ranks: int,
    num_steps: int = 200,
    plan_steps: int = 32,
    alone: float | None = None,
    failures: Failures | None = None,
) -> Prediction:
    """One row: see Prediction. `alone`: tokens/s of one GPU, where it is known."""
    made = simulate_features(
        setting, features, num_ranks=num_ranks, num_steps=num_steps, plan_steps=plan_steps
    )
    return summarise(setting, features, made, num_ranks=num_ranks, alone=alone, failures=failures)


def summarise(
    setting: Setting,
    features: Features,
    made: Simulated,
    *,
    num_ranks: int,
    alone: float | None = None,
    failures: Failures | None = None,
) -> Prediction:
    """The row of a simulated run."""
    warmup = min(WARMUP, len(made.outcome.ends) - 1)
    parts = made.outcome.accounts.parts(warmup=warmup)
    shares = parts.shares()
    steps = len(made.outcome.ends) - warmup
    tokens = float(made.loads.tokens.sum(axis=1).mean())
    useful = failures.useful_share(num_ranks) if failures else 1.0
    rate = tokens * steps / parts.total * useful
    contention = float(made.durations.contention[warmup:].mean(axis=1).sum()) / parts.total
    single = rate / num_ranks if num_ranks == 1 else alone or one_gpu_rate(setting)
    hours_per_billion = 1e9 / rate / 3600
    return Prediction(
        gpus=num_ranks,
        features=features,
        step_ms=1000 * parts.total / steps,
        tokens_per_s=rate,
        efficiency=rate / num_ranks / single,
        bubble=shares["bubble"],
        **{cause: shares[cause] for cause in CAUSES},
        contention=contention,
        lost=shares["bubble"] + contention,
        bound=made.loads.bound,
        planned=made.loads.planned,
        limit=limit(setting, made, shares, contention),
        cost_per_billion=hours_per_billion * num_ranks * setting.cluster.price_per_gpu_hour,
        exposed_mb=made.durations.exposed_bytes / 1e6,
        hidden_mb=made.durations.hidden_bytes / 1e6,
        network_mb=made.durations.network_bytes / 1e6,
        busiest_owner=made.durations.busiest_owner,
    )


def one_gpu_rate(setting: Setting) -> float:
    """Tokens/s of one GPU alone: what efficiency is held against."""
    features = Features(balancer="random", prioritized=False)
    return predict(setting, features, num_ranks=1, num_steps=64, plan_steps=64).tokens_per_s


def limit(setting: Setting, made: Simulated, shares: dict[str, float], contention: float) -> str:
    """The one resource to improve first."""
    losses = {**{cause: shares[cause] for cause in CAUSES}, "contention": contention}
    worst = max(losses, key=lambda name: losses[name])
    if losses[worst] < _NOTABLE:
        return "compute"
    if worst == "straggler":
        if made.loads.bound > 0.5 * shares["straggler"]:
            return "longest sample"
        return "uneven work" if made.loads.planned > 0.5 * shares["straggler"] else "jitter of ranks"
    if worst in ("comm", "contention") and setting.profile.shared_by > 1:
        return "exchanges on one GPU"
    if worst == "comm":
        ranks = made.durations.rows.shape[1]
        latency = Links(links_of(setting, ranks), ranks).latency()
        moving = float((made.durations.rows + made.durations.grads).mean())
        inside = ranks <= setting.cluster.gpus_per_node
        about_ids = float((made.durations.counts + made.durations.ids + made.durations.masks).mean())
        # Hidden, they stand in the way where they take longer than what they hide under.
        hides = made.features.prioritized
        if hides and not inside and about_ids > 0.9 * float(made.durations.compute.mean()):
            return "ids between hosts"
        return "latency" if 2 * latency > 0.6 * moving else "links in the node" if inside else "network"
    if worst == "host":
        return "host"
    return ("cores" if setting.profile.device == "cpu" else "SMs") + " taken by exchanges"


def table(
    setting: Setting,
    gpus: Sequence[int],
    combinations: Sequence[Features] = LADDER,
    *,
    num_steps: int = 200,
    failures: Failures | None = None,
) -> Iterator[Prediction]:
    """Every combination on every number of GPUs."""
    alone = one_gpu_rate(setting)
    for count in gpus:
        for features in unique_features(setting, combinations, count):
            yield predict(
                setting,
                features,
                num_ranks=count,
                num_steps=num_steps,
                plan_steps=plan_steps_for(count),
                alone=alone,
                failures=failures,
            )


def short_names(combinations: Sequence[Features]) -> list[str]:
    """One combination after the other: `balance`, `+ prioritized`, `+ dedup`; or everything `without` one."""
    known = {part for features in combinations for part in features.words().split(" + ")}
    every = [part for part in EVERYTHING.words().split(" + ") if part in known]
    names: list[str] = []
    before: list[str] = []
    for features in combinations:
        parts = features.words().split(" + ")
        missing = [part for part in every if part not in parts]
        if before and parts[:-1] == before:
            names.append(f"+ {parts[-1]}")
        elif (
            len(missing) == 1 and all(part in every for part in parts) and len(combinations) <= len(ABLATION)
        ):
            names.append(f"without {missing[0]}")
        else:
            names.append(features.words())
        before = parts
    return names


def plan_steps_for(num_ranks: int) -> int:
    """Different global batches worth planning: many ranks average over more samples by themselves."""
    return max(8, min(64, 16_384 // num_ranks))


def reduction(before: Prediction, after: Prediction, *, of: str = "bubble") -> float:
    """Share of the bubble (or of another share) that is gone."""
    was = float(getattr(before, of))
    return 1 - float(getattr(after, of)) / was if was > 0 else 0.0
