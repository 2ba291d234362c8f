"""What is recorded of where the time goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freescale.recipe.keys import key

if TYPE_CHECKING:
    from freescale.comm.world import Ranks
    from freescale.recipe.config import Config
    from freescale.train import Accounts, Progress, Run


@dataclass(frozen=True, kw_only=True)
class TraceSection:
    """What is recorded of where the time goes."""

    enabled: bool = key(
        True, "account for the time of every step, and keep spans for the timeline of the report", free=True
    )


def build_accounts(config: Config, ranks: Ranks, progress: Progress) -> Accounts:
    """What accounts for the time of every step; spans are recorded from here on."""
    from freescale import trace
    from freescale.comm.world import SharedClock
    from freescale.train import AccountedStep, Accounts, CudaClock, Stalls, write_step

    def write(step: AccountedStep) -> None:
        write_step(progress, step)

    if not config.trace.enabled:
        trace.record_into(None)
        return Accounts(ranks=ranks, recorder=None, write=write)
    recorder = trace.Recorder(CudaClock(ranks.device) if ranks.device.type == "cuda" else None)
    trace.record_into(recorder)
    return Accounts(
        ranks=ranks,
        recorder=recorder,
        write=write,
        every=config.run.log_every,
        clock=SharedClock(ranks),
        stalls=None if ranks.control is None else Stalls(),
    )


def open_span_file(run: Run, config: Config) -> None:
    """Let the accounts keep the spans of this rank, with one time zero for all of them."""
    import platform
    from pathlib import Path

    from freescale.comm.world import device_name
    from freescale.trace import SpanWriter

    accounts = run.accounts
    if accounts.recorder is None:
        return
    assert accounts.clock is not None
    accounts.spans = SpanWriter(
        Path(config.run.out),
        rank=run.ranks.rank,
        num_ranks=run.ranks.num_ranks,
        origin=accounts.clock.origin,
        facts={"host": platform.node(), "device": device_name(run.ranks.device)},
    )
