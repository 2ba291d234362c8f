"""Everything `freescale profile` measures, put together; `fits` makes lines of it."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from freescale.balance import MeasuredStep
from freescale.comm.world import Ranks, check_request, device_name, pick_device
from freescale.comm.world import virtual_gpus as virtual_gpus_of
from freescale.errors import ConfigError, TrainingError
from freescale.profiling.fits import (
    batch_rates,
    beside_neighbours,
    fit_steps,
    hiding_slowdown,
    neighbours_slowdown,
    repeat_spread,
    spread,
)
from freescale.profiling.gpu_rates import measure_gpu
from freescale.profiling.loop_times import measure_loop
from freescale.profiling.side_by_side import SideBySide, measure_side_by_side, measure_these
from freescale.profiling.step_times import StepTimes, measure_steps
from freescale.recipe import Config
from freescale.sim import Profile, Timing
from freescale.version import __version__

DEVICES = ("auto", "cpu", "cuda")


def measure_profile(
    config: Config,
    *,
    device: str = "auto",
    seconds: float = 90.0,
    most_samples: int = 32,
    threads: int = 1,
    virtual_gpus: int = 0,
    command: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure this machine's device with the model of a recipe.

    Args:
        config: the recipe.
        device: auto, cpu or cuda.
        seconds: for the steps; exchanges, copies and slowdowns take another minute at most.
        most_samples: samples of the largest batch.
        threads: of a CPU rank.
        virtual_gpus: so many ranks that share one GPU are measured side by side.
        command: how this was called, kept in the profile.
        say: told what is being done.

    Raises:
        ConfigError: another device; nothing is measured in its place.
        TrainingError: there is no GPU, or virtual ones cannot be had here.
    """
    if device not in DEVICES:
        raise ConfigError(
            "there is no such device to measure",
            got=device,
            allowed=", ".join(DEVICES),
            next_step="freescale profile --device cpu, or `freescale doctor` to see which devices there are",
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainingError(
            "--device cuda, but this machine has no usable CUDA device",
            got=f"torch {torch.__version__}, CUDA build: {torch.version.cuda or 'none'}",
            next_step="--device cpu, or `freescale doctor` to see what torch finds",
        )
    if virtual_gpus and device == "cpu":
        raise TrainingError(
            "virtual GPUs share one CUDA device",
            got=f"--virtual-gpus {virtual_gpus} --device cpu",
            next_step="leave one of them out",
        )
    begun = _Begun.now(command)
    if virtual_gpus:
        check_request(virtual_gpus, nproc=1, device=device)
        found = _measure_shared(config, virtual_gpus, seconds, most_samples, say)
    elif (chosen := pick_device(device)).type == "cuda":
        found = _measure_gpu(config, chosen, seconds, most_samples, say)
    else:
        found = _measure_cpu(config, seconds, most_samples, threads, say)
    return _profile_of(config, found, begun, shared_by=virtual_gpus or 1)


def measure_sharing_ranks(
    config: Config, ranks: Ranks, *, seconds: float, most_samples: int, command: str = ""
) -> Profile:
    """The same of ranks that share a GPU and run already; every one of them must call it.

    Args:
        config: the recipe.
        ranks: all of them share one GPU.
        seconds: for the steps.
        most_samples: samples of the largest batch.
        command: how this was called, kept in the profile.
    """
    begun = _Begun.now(command)
    found = measure_these(config, ranks, seconds=seconds, most_samples=most_samples)
    return _profile_of(config, _sharing(found), begun, shared_by=ranks.num_ranks)


class _Begun(NamedTuple):
    """What is known when a profile is begun: by which command, when, and how busy the machine was."""

    command: str
    at: float
    load: float

    @classmethod
    def now(cls, command: str) -> _Begun:
        return cls(command, time.monotonic(), os.getloadavg()[0])


def _profile_of(config: Config, found: _Found, begun: _Begun, *, shared_by: int) -> Profile:
    times, steps = found.times, found.steps
    return Profile(
        device=found.device,
        hardware=found.hardware,
        model=_model_facts(config, steps),
        times=times,
        rates={**found.rates, **found.unmeasured},
        # In a run of ranks that share a GPU no batch comes twice: what they vary by contains the error of the fit.
        jitter=spread(found.singles, times) if found.singles else repeat_spread(steps.same),
        measured=(*(f"times.{name}" for name in times), "jitter", *(f"rates.{name}" for name in found.rates)),
        shared_by=shared_by,
        facts={
            "command": begun.command,
            "date": str(datetime.date.today()),
            "seconds": round(time.monotonic() - begun.at, 1),
            "shapes": len(steps.steps["forward"]),
            "gaps": "host",
            "postponed_without_room": round(steps.share_without_room, 3),
            "cores": os.cpu_count(),
            "load_average": round(begun.load, 2),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "freescale": __version__,
        },
    )


def doubts(profile: Profile) -> list[str]:
    """What to say where the machine was disturbed when it began to be measured, or short of memory."""
    found = []
    load, cores = float(profile.facts["load_average"]), int(profile.facts["cores"])
    if load > cores / 4:
        found.append(
            f"others used this machine: load average {load:.1f} on {cores} cores before it began, so times are too "
            "long; measure again when it is idle"
        )
    if without := float(profile.facts["postponed_without_room"]):
        found.append(
            f"{without:.1%} of the weight gradients that can be postponed were computed at once: what they are made of "
            "had no room, so `weights` is too short for runs that have; pipeline.postpone_mb gives more, fewer "
            "samples (--samples) need less"
        )
    return found


@dataclass(frozen=True)
class _Found:
    """Measurements of one kind of rank.

    Args:
        singles: single steps, to tell how much they vary; those of `steps` unless given.
        unmeasured: rates that stand in for what could not be measured.
    """

    device: str
    hardware: str
    steps: StepTimes
    times: dict[str, Timing]
    rates: dict[str, float]
    singles: Sequence[MeasuredStep] = ()
    unmeasured: dict[str, float] = field(default_factory=dict)


def _measure_cpu(
    config: Config, seconds: float, most_samples: int, threads: int, say: Callable[[str], None]
) -> _Found:
    """One rank alone, then two and four at once: what each more of them adds, on a machine with fewer cores, too."""
    device, before = torch.device("cpu"), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        name = device_name(device)
        say(f"steps of {config.model.kind} on {name}")
        steps = measure_steps(config, device, seconds=seconds, most_samples=most_samples)
    finally:
        torch.set_num_threads(before)
    fits = fit_steps(steps)
    on_cpu = dataclasses.replace(config, run=dataclasses.replace(config.run, device="cpu"))
    several = {}
    for count in (2, 4):
        say(f"steps, host and exchanges of {count} ranks at once")
        several[count] = measure_side_by_side(
            on_cpu,
            num_ranks=count,
            environment={"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"},
            seconds=seconds / 10,
            most_samples=most_samples,
        )
    two, four = several[2].rates, several[4].rates
    added = {
        f"{name}_per_rank": max(0.0, (four[name] - two[name]) / 2)
        for name in ("exchange_us", "sum_us", "control_us")
    }
    added |= {
        f"{name}_s_per_gb_per_rank": max(0.0, (1 / four[rate] - 1 / two[rate]) / 2)
        for name, rate in (("exchange", "exchange_gb_per_s"), ("sum", "sum_gb_per_s"))
    }
    hosts = {name: several[2].lines[name] for name in ("host", "host_hiding")}
    return _Found("cpu", name, steps, fits | hosts, {**two, **added, **batch_rates(steps, fits)})


def _measure_gpu(
    config: Config, device: torch.device, seconds: float, most_samples: int, say: Callable[[str], None]
) -> _Found:
    name = device_name(device)
    say(f"steps of {config.model.kind} on {name}")
    steps = measure_steps(config, device, seconds=seconds, most_samples=most_samples)
    say("what a step costs the host")
    alone = Ranks(rank=0, num_ranks=1, device=device)
    loops = {
        name: measure_loop(config, alone, most_samples=most_samples, hiding=hiding)
        for name, hiding in (("host", False), ("host_hiding", True))
    }
    times = {**fit_steps(steps), **{name: loop.host for name, loop in loops.items()}}
    say("copies, and compute beside them")
    rates = {**measure_gpu(device), **batch_rates(steps, times), "pads": loops["host_hiding"].pads}
    if not loops["host_hiding"].captured:
        del rates["graph_cut_us"]  # steps of this recipe are no graphs
    # Two ranks need two GPUs, or virtual ones: what an exchange through the host could reach stands in for it.
    slower = min(rates["host_to_device_gb_per_s"], rates["device_to_host_gb_per_s"])
    instead = {"exchange_gb_per_s": slower, "exchange_us": 55.0, "sum_gb_per_s": slower, "sum_us": 55.0}
    return _Found("cuda", name, steps, times, rates, unmeasured={**instead, "control_us": 50.0})


def _measure_shared(
    config: Config, num_ranks: int, seconds: float, most_samples: int, say: Callable[[str], None]
) -> _Found:
    on_gpu = dataclasses.replace(config, run=dataclasses.replace(config.run, device="cuda"))
    with virtual_gpus_of(num_ranks) as shared:
        say(f"steps, host and exchanges of {shared.message}")
        found = measure_side_by_side(
            on_gpu,
            num_ranks=num_ranks,
            environment=shared.environment,
            seconds=seconds,
            most_samples=most_samples,
        )
    return _sharing(found)


def _sharing(found: SideBySide) -> _Found:
    """What ranks that share a GPU have measured, each as slow as it is beside the others."""
    alone, run = fit_steps(found.steps), found.in_a_run
    rates = {
        "neighbours_slowdown": neighbours_slowdown(alone, run.plain),
        "hiding_slowdown": hiding_slowdown(run),
        "shortest_ms": float(np.median([step.ms for step in run.shortest])) if run.shortest else 0.0,
    }
    times = beside_neighbours(alone, rates["neighbours_slowdown"])
    return _Found(
        "cuda", found.hardware, found.steps, times | found.lines, found.rates | rates, singles=run.plain
    )


def _model_facts(config: Config, steps: StepTimes) -> dict[str, object]:
    options = config.model
    return {
        "kind": options.kind,
        "layers": options.layers,
        "dim": options.dim,
        "heads": options.heads,
        "dtype": options.dtype,
        "negatives": config.head.num_negatives,
        "max_length": config.data.max_length,
        "dense_parameters": steps.dense_parameters,
        "row_bytes": steps.row_bytes,
        **({"tables": steps.tables} if steps.tables else {}),
    }
