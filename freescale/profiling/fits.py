"""What single steps say together: a line for every part, how far off it is, and what neighbours do to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from freescale.balance import COEFFICIENTS, FloatArray, MeasuredStep, fit_cost_model
from freescale.errors import DataError
from freescale.profiling.side_by_side import InARun
from freescale.profiling.step_times import StepTimes
from freescale.sim import WEIGHTS, Timing, cost_model_of


def neighbours_slowdown(times: Mapping[str, Timing], in_a_run: Sequence[MeasuredStep]) -> float:
    """How much longer a token takes in a run than alone, on ranks that share a GPU.

    Single parts of a step are measured while neighbours stand still most of the time, between parts of their own. Each
    has its SMs to itself, but the memory is everybody's: what is bound by it, and so grows with the tokens, takes
    longer in a run, where all compute at once.
    """
    alone = cost_model_of(times)

    def rest_ms(step: MeasuredStep) -> float:
        return alone.fixed_ms + alone.per_sample_ms * step.num_samples + alone.per_square_ms * step.squares

    ratios = [
        (step.ms - rest_ms(step)) / (alone.per_token_ms * step.tokens)
        for step in in_a_run
        if alone.per_token_ms * step.tokens > 0
    ]
    return max(1.0, float(np.median(ratios))) if ratios else 1.0


def beside_neighbours(times: dict[str, Timing], slowdown: float) -> dict[str, Timing]:
    """Forward and backward of ranks that share a GPU, as slow as they are in a run."""
    return times | {
        name: dataclasses.replace(times[name], per_token_ms=slowdown * times[name].per_token_ms)
        for name in ("forward", "backward", WEIGHTS)
        if name in times
    }


def hiding_slowdown(run: InARun) -> float:
    """How much longer the same steps compute while rows are moved and updated beside them."""
    ratios = [
        hiding.ms / plain.ms
        for plain, hiding in zip(run.plain, run.hiding)
        if plain.tokens == hiding.tokens and plain.ms > 0
    ]
    return max(1.0, float(np.median(ratios))) if ratios else 1.0


def fit_steps(steps: StepTimes) -> dict[str, Timing]:
    """A line for every part that was measured, but for the host: that is told by a run."""
    # A model whose layers postpone nothing has no line for it.
    none = {
        name
        for name in ("host", WEIGHTS)
        if name == "host" or not all(one.ms > 0 for one in steps.steps[name])
    }
    return {name: _fit(name, found) for name, found in steps.steps.items() if name not in none}


def spread(singles: Sequence[MeasuredStep], times: Mapping[str, Timing]) -> float:
    """Relative deviation of single steps about the fit, by the median: a pause of the machine does not count."""
    ratios = _over_fit(singles, times)
    return 1.4826 * float(np.median(np.abs(ratios / np.median(ratios) - 1)))


def repeat_spread(same: Sequence[MeasuredStep]) -> float:
    """Relative deviation of one batch that comes again and again, by the median."""
    ms = np.array([step.ms for step in same])
    return 1.4826 * float(np.median(np.abs(ms / np.median(ms) - 1))) if len(ms) else 0.0


def cost_error(steps: StepTimes, times: Mapping[str, Timing]) -> float:
    """Relative deviation of different batches about the fit, of those at least a quarter as large as the largest.

    Small ones do not matter: balanced ranks have much to do each. As many degrees of freedom as the fit has
    coefficients are used up.
    """
    both = [
        MeasuredStep(one.num_samples, one.tokens, one.squares, one.ms + other.ms)
        for one, other in zip(steps.steps["forward"], steps.steps["backward"])
    ]
    most = max(step.tokens for step in both)
    large = [step for step in both if 4 * step.tokens >= most]
    used = len(COEFFICIENTS)
    room = len(both) / max(1, len(both) - used)
    return float(np.sqrt(room)) * spread(large, times)


def batch_rates(steps: StepTimes, times: Mapping[str, Timing]) -> dict[str, float]:
    """What batches say beside the lines: how far off these are, and how long a history was."""
    return {"cost_error": cost_error(steps, times), "longest_profiled": float(steps.longest)}


def _over_fit(singles: Sequence[MeasuredStep], times: Mapping[str, Timing]) -> FloatArray:
    """Forward and backward of each step, over what the fit says."""
    ratios = []
    for step in singles:
        parts = (
            times[name].seconds(samples=step.num_samples, tokens=step.tokens, squares=step.squares)
            for name in ("forward", "backward")
        )
        ratios.append(step.ms / (1000 * float(sum(parts))))
    return np.array(ratios)


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
