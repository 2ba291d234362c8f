"""What is recorded of where the time goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freescale.recipe.reading.keys import key

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
    kernels: bool = key(
        True,
        "on a GPU, see a few steps kernel by kernel, so that gaps between kernels count as host time",
        free=True,
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
    recorder = trace.Recorder(
        CudaClock(ranks.device) if ranks.device.type == "cuda" else None,
        say=lambda text: progress.notice(recorder.step, text),
        shows=trace.is_kept,
    )
    trace.record_into(recorder)
    accounts = Accounts(
        ranks=ranks,
        recorder=recorder,
        write=write,
        every=config.run.log_every,
        clock=SharedClock(ranks),
        stalls=None if ranks.control is None else Stalls(),
        # A CPU rank would only take a core from itself; a GPU alone gains nothing by it (docs/results.md).
        beside=ranks.device.type == "cuda" and ranks.control is not None,
        say=lambda text: progress.notice(recorder.step, text),
    )
    if ranks.device.type == "cuda" and config.trace.kernels:
        measure_busy_time(accounts)
    return accounts


def measure_busy_time(accounts: Accounts) -> None:
    """Let the accounts of a GPU's steps tell work from gaps between kernels."""
    from freescale.comm.world import virtual_gpus_here
    from freescale.train import BusyMeter, DriverCounter, KernelWatch, open_nvml

    device, recorder = accounts.ranks.device, accounts.recorder
    assert recorder is not None
    accounts.busy = BusyMeter(watch=KernelWatch(device, recorder.clock), clock=recorder.clock)
    if not virtual_gpus_here():  # the driver cannot tell ranks that share a GPU from each other
        accounts.driver = DriverCounter(lambda: open_nvml(device), say=accounts.say)


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
