"""Everything `freescale profile` measures, put together and fitted."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from freescale.balance.cost_fit import MeasuredStep, fit_cost_model
from freescale.balance.cost_model import COEFFICIENTS
from freescale.comm.ranks import device_name, pick_device
from freescale.config import Config
from freescale.errors import ConfigError, DataError
from freescale.profiling.exchange_times import measure_exchanges
from freescale.profiling.gpu_rates import measure_gpu
from freescale.profiling.loop_times import measure_host
from freescale.profiling.step_times import StepTimes, measure_steps
from freescale.sim.profile import Profile, Timing

DEVICES = ("auto", "cpu", "cuda")


def measure_profile(
    config: Config,
    *,
    device: str = "auto",
    seconds: float = 90.0,
    most_samples: int = 32,
    threads: int = 1,
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
        command: how this was called, kept in the profile.
        say: told what is being done.

    Raises:
        ConfigError: another device; nothing is measured in its place.
    """
    if device not in DEVICES:
        raise ConfigError(
            "there is no such device to measure",
            got=device,
            allowed=", ".join(DEVICES),
            next_step="freescale profile --device cpu, or `freescale doctor` to see which devices there are",
        )
    began = time.monotonic()
    chosen = pick_device(device)
    before = torch.get_num_threads()
    if chosen.type == "cpu":
        torch.set_num_threads(threads)
    try:
        say(f"steps of {config.model.kind} on {device_name(chosen)}")
        steps = measure_steps(config, chosen, seconds=seconds, most_samples=most_samples)
        say("what a step costs the host")
        host = measure_host(config, chosen, most_samples=most_samples)
        name = device_name(chosen)
    finally:
        torch.set_num_threads(before)
    times = {name: _fit(name, found) for name, found in steps.steps.items() if name != "host"} | {
        "host": host
    }
    measured = [f"times.{name}" for name in times] + ["jitter"]
    say("exchanges between two ranks" if chosen.type == "cpu" else "copies, and compute beside them")
    rates = _rates(chosen, measured)
    return Profile(
        device=chosen.type,
        hardware=name,
        model=_model_facts(config, steps),
        times=times,
        rates=rates,
        jitter=spread(steps.singles, times),
        measured=tuple(measured),
        facts={
            "command": command,
            "date": str(datetime.date.today()),
            "seconds": round(time.monotonic() - began, 1),
            "shapes": len(steps.steps["forward"]),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 2),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "freescale": importlib.metadata.version("freescale"),
        },
    )


def spread(singles: Sequence[MeasuredStep], times: dict[str, Timing]) -> float:
    """Relative deviation of single steps about the fit, by the median: a pause of the machine does not count."""
    ratios = []
    for step in singles:
        parts = (
            times[name].seconds(samples=step.num_samples, tokens=step.tokens, squares=step.squares)
            for name in ("forward", "backward")
        )
        ratios.append(step.ms / (1000 * float(sum(parts))))
    return 1.4826 * float(np.median(np.abs(np.array(ratios) / np.median(ratios) - 1)))


def _fit(name: str, steps: list[MeasuredStep]) -> Timing:
    """The line through the measurements of a part; a constant where it does not grow with anything."""
    try:
        fit = fit_cost_model(steps)
    except DataError:
        ms = np.array([step.ms for step in steps])
        middle = float(np.median(ms))
        errors = np.abs(middle / ms - 1)
        return Timing(
            fixed_ms=middle, error=float(np.median(errors)), worst_error=float(np.quantile(errors, 0.9))
        )
    line = {key: getattr(fit.model, key) for key in COEFFICIENTS}
    return Timing(**line, error=fit.error, worst_error=fit.worst_error)


def _rates(device: torch.device, measured: list[str]) -> dict[str, float]:
    if device.type == "cpu":
        rates = measure_exchanges()
        measured += [f"rates.{name}" for name in rates]
        return rates
    rates = measure_gpu(device)
    measured += [f"rates.{name}" for name in rates]
    # Two ranks need two GPUs, or virtual ones: what an exchange through the host could reach stands in for it.
    slower = min(rates["host_to_device_gb_per_s"], rates["device_to_host_gb_per_s"])
    unmeasured = {"exchange_gb_per_s": slower, "exchange_us": 55.0, "sum_gb_per_s": slower, "sum_us": 55.0}
    return {**rates, **unmeasured, "control_us": 50.0}


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
    }
