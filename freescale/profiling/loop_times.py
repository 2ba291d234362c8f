"""The project's own training loop in short runs: what a step costs beside its model, and how long ranks compute."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from freescale import trace
from freescale.balance import MeasuredStep
from freescale.comm.world import Ranks
from freescale.recipe import Config, build_run, build_source
from freescale.sim import Timing
from freescale.train import AccountedStep, Progress, take_steps

_STEPS, _WARM = 14, 4
_CPU_STEPS, _CPU_WARM = 34, 14
"""Of several CPU ranks, whose first exchanges are slower: rings grow at the eighth message of a size."""
_NEVER = 10**9
_SEEN = 12
"""Steps of a GPU that are seen kernel by kernel between the two: its host's time contains the gaps between kernels."""


@dataclass(frozen=True)
class LoopTimes:
    """What short runs have shown; lines over tokens are known to the first rank, for all.

    Args:
        host: what a step costs the host; on several CPU ranks with its share of the accounts at log steps.
        row_work: what a step computes beside forward and backward.
        exchanges: for how long ranks that have all arrived stand still for each other's rows and gradients.
        steps: forward and backward of this rank in the largest batches, beside all others.
        shortest: the same in the smallest.
        pads: what padded batches, which a GPU replays, compute for nothing, over all that somebody wants.
        captured: share of the steps that were replayed.
    """

    host: Timing
    row_work: Timing
    exchanges: Timing
    steps: list[MeasuredStep]
    shortest: list[MeasuredStep]
    pads: float = 0.0
    captured: float = 0.0


def measure_loop(
    config: Config, ranks: Ranks, *, most_samples: int, hiding: bool = False, folder: Path | None = None
) -> LoopTimes:
    """Train for some steps; every rank must call it.

    Args:
        config: the recipe.
        ranks: who takes part.
        most_samples: of a rank.
        hiding: by the schedule that hides embedding traffic, which several ranks have. One rank alone makes batches
            ready beside its compute, as that schedule does.
        folder: the same on all ranks; one of its own if there is no other.
    """
    with tempfile.TemporaryDirectory(prefix="freescale-profile-") as own:
        low, high = (
            short_run(config, ranks, samples=size, hiding=hiding, folder=(folder or Path(own)) / str(size))
            for size in (1, most_samples)
        )
    tokens = low.tokens, high.tokens
    return LoopTimes(
        host=line_over_tokens(tokens, (low.host_ms, high.host_ms)),
        row_work=line_over_tokens(tokens, (low.row_work_ms, high.row_work_ms)),
        exchanges=line_over_tokens(tokens, (low.exchanges_ms, high.exchanges_ms)),
        steps=high.steps,
        shortest=low.steps,
        pads=high.pads,
        captured=high.captured,
    )


def line_over_tokens(tokens: tuple[float, float], ms: tuple[float, float]) -> Timing:
    """Through both; as large batches have it where it falls: a GPU with more to do hides more of the host."""
    (few, many), (low, high) = tokens, ms
    if high <= low:
        return Timing(fixed_ms=high)
    slope = (high - low) / max(1.0, many - few)
    slope = min(slope, high / max(1.0, many))  # nothing takes less than no time
    return Timing(fixed_ms=max(0.0, high - slope * many), per_token_ms=slope)


def usual_host_ms(steps: Sequence[float], *, on_cpu: bool) -> float:
    """The host's time of a step, by the clock, from that of several.

    On a GPU what lies above the lower quarter is other programs' doing. CPU ranks have it in every run, from threads of
    their own: in 20 runs of 40 steps the lower quarter was 15 % below the mean, the median 2 %.
    """
    return sorted(steps)[len(steps) // (2 if on_cpu else 4)]


@dataclass(frozen=True)
class ShortRun:
    """Usual milliseconds and mean tokens of a rank's step, which the first rank knows; this rank's compute."""

    host_ms: float
    row_work_ms: float
    exchanges_ms: float
    tokens: float
    steps: list[MeasuredStep]
    pads: float = 0.0
    captured: float = 0.0


def short_run(config: Config, ranks: Ranks, *, samples: int, hiding: bool, folder: Path) -> ShortRun:
    """Train for some steps of so many samples a rank."""
    # Accounts of many steps at once are made in every run of several ranks; on CPUs they are counted apart.
    apart = ranks.device.type == "cpu" and ranks.num_ranks > 1
    warm = _CPU_WARM if apart else _WARM + (_SEEN if ranks.device.type == "cuda" else 0)
    num_steps = _CPU_STEPS if apart else warm + _STEPS - _WARM
    small = replace(
        config,
        run=replace(
            config.run,
            steps=num_steps,
            out=str(folder),
            log_every=_NEVER if apart else 1,
            eval_every=_NEVER,
        ),
        data=replace(config.data, global_batch=samples * ranks.num_ranks, global_tokens=None),
        eval=replace(config.eval, max_users=1),
        # Several ranks, which are to be foretold, load in turn, or while the compute that they have queued runs.
        # Nothing is postponed: updates inside replays would count as compute that rows beside it have slowed down.
        pipeline=replace(
            config.pipeline, ahead=hiding, prioritized=hiding, decide_every=None, postpone="off"
        ),
        trace=replace(config.trace, enabled=True, kernels=True),
    )
    seen: list[AccountedStep] = []
    run = build_run(small, build_source(small), ranks, Progress())
    run.accounts.write = seen.append
    if run.accounts.busy is not None:
        run.accounts.busy.warm, run.accounts.busy.lasts = _WARM, _SEEN
    try:
        with run.open_schedule(0) as schedule:
            take_steps(run, schedule)
    finally:
        run.accounts.close()
        trace.record_into(None)
    computed = run.train_step.timer.take()[warm:]
    if not ranks.is_first:
        return ShortRun(0.0, 0.0, 0.0, 0.0, computed)
    steps = [step for step in seen if step.ranks][warm:]
    host = usual_host_ms([1000 * fmean(one.host for one in step.ranks) for step in steps], on_cpu=apart)
    if apart:
        host += 1000 * run.accounts.cpu_s / len(seen)
    tokens = fmean(float(str(step.line["tokens"])) for step in steps)
    own = [1000 * step.ranks[0].compute - model.ms for step, model in zip(steps, computed)]
    return ShortRun(
        host_ms=host,
        row_work_ms=max(0.0, median(own)),
        exchanges_ms=median(1000 * fmean(one.comm for one in step.ranks) for step in steps),
        tokens=tokens / ranks.num_ranks,
        steps=computed,
        pads=run.train_step.timer.pads,
        captured=run.train_step.captured_share() or 0.0,
    )
