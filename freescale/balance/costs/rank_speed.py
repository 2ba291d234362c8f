"""How fast each rank computes, from its own measured steps: robust to noise, slow to change, never wild."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freescale.balance.arrays import FloatArray
from freescale.balance.costs.cost_fit import MeasuredStep, table_of
from freescale.balance.costs.cost_model import CostModel

SLOWEST, FASTEST = 0.4, 2.0
# A rank whose speed seems to have changed by less than so many standard errors of its window keeps the old one.
BELIEVED = 2.0
# And in no case by less than the first; the second is taken where a window is too short to tell its error.
LEAST_NOTICEABLE, NOTICEABLE = 0.002, 0.03
_FEWEST_STEPS = 8
# The error of a median, over that of a mean.
_OF_MEDIAN = 1.2533
# The largest change one decision makes, so that one bad measurement cannot throw the balance over.
LARGEST_CHANGE = 0.35


def measured_speeds(steps_by_rank: Sequence[Sequence[MeasuredStep]], model: CostModel) -> FloatArray:
    """[ranks] speed of every rank relative to the median rank; 1 where a rank has measured nothing.

    Speed is predicted over measured time, by the median over the steps: one pause does not count.
    """
    ratios = np.array([_median_ratio(steps, model) for steps in steps_by_rank])
    known = np.isfinite(ratios)
    if not known.any():
        return np.ones(len(ratios))
    speeds = np.where(known, ratios / np.median(ratios[known]), 1.0)
    return np.clip(speeds, SLOWEST, FASTEST)


def speed_errors(steps_by_rank: Sequence[Sequence[MeasuredStep]], model: CostModel) -> FloatArray:
    """[ranks] relative standard error of each measured speed; not a number where a window is too short to tell.

    Steps of a rank vary about what the model expects, by jitter and by the model's own error; the median of many does
    so much less.
    """
    return np.array([_error_of_median(_ratios(steps, model)) for steps in steps_by_rank])


def next_speeds(current: FloatArray, measured: FloatArray, errors: FloatArray | None = None) -> FloatArray:
    """The speeds to plan with: measured ones where they differ noticeably, and not too far from the current.

    Differences of 1.5 % between GPUs cost a tenth of that as wait if they are known, and all of it if not: so what is
    noticed follows from how well the window tells (`errors`), not from a fixed number.
    """
    noticed = np.full(len(measured), NOTICEABLE)
    if errors is not None:
        told = np.maximum(BELIEVED * errors, LEAST_NOTICEABLE)
        noticed = np.where(np.isfinite(errors), told, noticed)
    change = np.clip(measured / current, 1 - LARGEST_CHANGE, 1 + LARGEST_CHANGE)
    moved = np.where(np.abs(measured / current - 1) > noticed, current * change, current)
    return np.clip(moved, SLOWEST, FASTEST).round(4)


def at_equal_speed(steps: Sequence[MeasuredStep], speed: float) -> list[MeasuredStep]:
    """The steps of a rank as a rank of speed 1 would have measured them, so that all ranks fit one model."""
    return [MeasuredStep(step.num_samples, step.tokens, step.squares, step.ms * speed) for step in steps]


def _median_ratio(steps: Sequence[MeasuredStep], model: CostModel) -> float:
    ratios = _ratios(steps, model)
    return float(np.median(ratios)) if len(ratios) else float("nan")


def _ratios(steps: Sequence[MeasuredStep], model: CostModel) -> FloatArray:
    """Expected over measured time of every step."""
    table = table_of(steps)
    table = table[(table[:, 0] > 0) & (table[:, 3] > 0)]
    return np.asarray(model.batches_ms(table) / table[:, 3])


def _error_of_median(ratios: FloatArray) -> float:
    if len(ratios) < _FEWEST_STEPS:
        return float("nan")
    spread = 1.4826 * float(np.median(np.abs(ratios / np.median(ratios) - 1)))
    return _OF_MEDIAN * spread / float(np.sqrt(len(ratios)))
