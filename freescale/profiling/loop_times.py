"""What a step costs the host: the project's own training loop, less everything that is compute or exchange."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from freescale.assembly import build_run, build_source
from freescale.comm.ranks import Ranks
from freescale.config import Config
from freescale.sim.profile import Timing
from freescale.trace import spans
from freescale.train.accounting import AccountedStep
from freescale.train.events import Progress
from freescale.train.loop import take_steps

_STEPS, _WARM = 14, 4


def measure_host(
    config: Config, ranks: Ranks, *, most_samples: int, hiding: bool = False, folder: Path | None = None
) -> Timing:
    """A line over tokens, from steps of the smallest and of the largest batch; every rank must call it.

    Args:
        config: the recipe.
        ranks: who takes part.
        most_samples: of a rank.
        hiding: by the schedule that hides embedding traffic, which several ranks have.
        folder: the same on all ranks; one of its own if there is no other.
    """
    with tempfile.TemporaryDirectory(prefix="freescale-profile-") as own:
        (low_tokens, low_ms), (high_tokens, high_ms) = (
            _host_ms(config, ranks, samples=size, hiding=hiding, folder=(folder or Path(own)) / str(size))
            for size in (1, most_samples)
        )
    slope = max(0.0, (high_ms - low_ms) / max(1.0, high_tokens - low_tokens))
    return Timing(fixed_ms=max(0.0, low_ms - slope * low_tokens), per_token_ms=slope)


def _host_ms(
    config: Config, ranks: Ranks, *, samples: int, hiding: bool, folder: Path
) -> tuple[float, float]:
    """Mean tokens of a rank and usual host milliseconds of a step, of a short run."""
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
    if not ranks.is_first:
        return 0.0, 0.0  # the first has what all of them have recorded
    steps = [step for step in seen if step.ranks][_WARM:]
    # The host's time is by the clock: what lies above the lower quarter is other programs' doing.
    host = sorted(1000 * fmean(one.host for one in step.ranks) for step in steps)[len(steps) // 4]
    tokens = fmean(float(str(step.line["tokens"])) for step in steps)
    return tokens / ranks.num_ranks, host
