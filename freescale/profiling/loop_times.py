"""The project's own training loop in short runs: what a step costs the host, and how long ranks compute in it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from freescale.assembly import build_run, build_source
from freescale.balance.cost_fit import MeasuredStep
from freescale.comm.ranks import Ranks
from freescale.config import Config
from freescale.sim.profile import Timing
from freescale.trace import spans
from freescale.train.accounting import AccountedStep
from freescale.train.events import Progress
from freescale.train.loop import take_steps

_STEPS, _WARM = 14, 4


@dataclass(frozen=True)
class LoopTimes:
    """What short runs have shown.

    Args:
        host: a line over tokens, from steps of the smallest and of the largest batch; on the first rank, for all.
        steps: forward and backward of this rank in the largest ones, beside all others.
    """

    host: Timing
    steps: list[MeasuredStep]


def measure_loop(
    config: Config, ranks: Ranks, *, most_samples: int, hiding: bool = False, folder: Path | None = None
) -> LoopTimes:
    """Train for some steps; every rank must call it.

    Args:
        config: the recipe.
        ranks: who takes part.
        most_samples: of a rank.
        hiding: by the schedule that hides embedding traffic, which several ranks have.
        folder: the same on all ranks; one of its own if there is no other.
    """
    with tempfile.TemporaryDirectory(prefix="freescale-profile-") as own:
        low, high = (
            _short_run(config, ranks, samples=size, hiding=hiding, folder=(folder or Path(own)) / str(size))
            for size in (1, most_samples)
        )
    return LoopTimes(host_line(low, high), high.steps)


def host_line(low: ShortRun, high: ShortRun) -> Timing:
    """Through both; as large batches have it where it falls: a GPU with more to do hides more of the host."""
    if high.host_ms <= low.host_ms:
        return Timing(fixed_ms=high.host_ms)
    slope = (high.host_ms - low.host_ms) / max(1.0, high.tokens - low.tokens)
    slope = min(slope, high.host_ms / max(1.0, high.tokens))  # nothing takes less than no time
    return Timing(fixed_ms=max(0.0, high.host_ms - slope * high.tokens), per_token_ms=slope)


@dataclass(frozen=True)
class ShortRun:
    """Usual host milliseconds and mean tokens of a rank's step, which the first rank knows; this rank's compute."""

    host_ms: float
    tokens: float
    steps: list[MeasuredStep]


def _short_run(config: Config, ranks: Ranks, *, samples: int, hiding: bool, folder: Path) -> ShortRun:
    small = replace(
        config,
        run=replace(config.run, steps=_STEPS, out=str(folder), log_every=1, eval_every=10**9),
        data=replace(config.data, global_batch=samples * ranks.num_ranks, global_tokens=None),
        eval=replace(config.eval, max_users=1),
        # Several ranks, which are to be foretold, load in turn.
        pipeline=replace(config.pipeline, ahead=False, prioritized=hiding, decide_every=None),
    )
    seen: list[AccountedStep] = []
    run = build_run(small, build_source(small), ranks, Progress())
    run.accounts.write = seen.append
    try:
        with run.open_schedule(0) as schedule:
            take_steps(run, schedule)
    finally:
        run.accounts.close()
        spans.record_into(None)
    computed = run.train_step.timer.take()[_WARM:]
    if not ranks.is_first:
        return ShortRun(0.0, 0.0, computed)
    steps = [step for step in seen if step.ranks][_WARM:]
    # The host's time is by the clock: what lies above the lower quarter is other programs' doing.
    host = sorted(1000 * fmean(one.host for one in step.ranks) for step in steps)[len(steps) // 4]
    tokens = fmean(float(str(step.line["tokens"])) for step in steps)
    return ShortRun(host, tokens / ranks.num_ranks, computed)
