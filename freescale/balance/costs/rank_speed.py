"""How fast each rank computes, from its own measured steps: robust to noise, slow to change, never wild."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freescale.balance.arrays import FloatArray
from freescale.balance.costs.cost_fit import MeasuredStep, table_of
from freescale.balance.costs.cost_model import CostModel

SLOWEST, FASTEST = 0.4, 2.0
# A rank whose speed seems to have changed by less keeps the old one: timing noise is of this size.
NOTICEABLE = 0.03
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


def next_speeds(current: FloatArray, measured: FloatArray) -> FloatArray:
    """The speeds to plan with: measured ones where they differ noticeably, and not too far from the current."""
    change = np.clip(measured / current, 1 - LARGEST_CHANGE, 1 + LARGEST_CHANGE)
    moved = np.where(np.abs(measured / current - 1) > NOTICEABLE, current * change, current)
    return np.clip(moved, SLOWEST, FASTEST).round(4)


def at_equal_speed(steps: Sequence[MeasuredStep], speed: float) -> list[MeasuredStep]:
    """The steps of a rank as a rank of speed 1 would have measured them, so that all ranks fit one model."""
    return [MeasuredStep(step.num_samples, step.tokens, step.squares, step.ms * speed) for step in steps]


def _median_ratio(steps: Sequence[MeasuredStep], model: CostModel) -> float:
    table = table_of(steps)
    table = table[(table[:, 0] > 0) & (table[:, 3] > 0)]
    return float(np.median(model.batches_ms(table) / table[:, 3])) if len(table) else float("nan")
