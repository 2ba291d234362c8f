"""What a step costs the host: the project's own training loop on one rank, less everything that is compute."""

from __future__ import annotations

import dataclasses
import tempfile

import torch

from freescale.assembly import build_run, build_source
from freescale.comm.ranks import Ranks
from freescale.config import Config
from freescale.sim.profile import Timing
from freescale.trace import spans
from freescale.train.accounting import AccountedStep
from freescale.train.events import Progress
from freescale.train.loop import named, reports_of

_STEPS, _WARM = 14, 4


def measure_host(config: Config, device: torch.device, *, most_samples: int) -> Timing:
    """A line over tokens, from steps of the smallest and of the largest batch."""
    (low_tokens, low_ms), (high_tokens, high_ms) = (
        _host_ms(config, device, global_batch=size) for size in (1, most_samples)
    )
    slope = max(0.0, (high_ms - low_ms) / max(1.0, high_tokens - low_tokens))
    return Timing(fixed_ms=max(0.0, low_ms - slope * low_tokens), per_token_ms=slope)


def _host_ms(config: Config, device: torch.device, *, global_batch: int) -> tuple[float, float]:
    """Mean tokens and usual host milliseconds of a step, of a short run that writes nothing that stays."""
    with tempfile.TemporaryDirectory(prefix="freescale-profile-") as folder:
        small = dataclasses.replace(
            config,
            run=dataclasses.replace(config.run, steps=_STEPS, out=folder, log_every=1, eval_every=10**9),
            data=dataclasses.replace(config.data, global_batch=global_batch, global_tokens=None),
            eval=dataclasses.replace(config.eval, max_users=1),
            # Several ranks, which are to be foretold, load in turn.
            pipeline=dataclasses.replace(config.pipeline, ahead=False),
        )
        ranks = Ranks(rank=0, num_ranks=1, device=device)
        seen: list[AccountedStep] = []
        run = build_run(small, build_source(small), ranks, Progress())
        run.accounts.write = seen.append
        try:
            with run.open_schedule(0) as schedule:
                run.accounts.begin(1)
                reports = reports_of(run)
                for ready in named(schedule, 0):
                    result = run.train_step.run(ready, schedule)
                    reports.add(ready, result, seconds=run.accounts.end_step())
                reports.settle()
                run.accounts.pause()
        finally:
            run.accounts.close()
            spans.record_into(None)
    steps = [step for step in seen if step.ranks][_WARM:]
    # The host's time is by the clock: what lies above the lower quarter is other programs' doing.
    host = sorted(1000 * step.ranks[0].host for step in steps)[len(steps) // 4]
    return sum(float(str(step.line["tokens"])) for step in steps) / len(steps), host
