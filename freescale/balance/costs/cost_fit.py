"""Fits the cost model to measured steps, once from a profile or again and again from the run itself."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.costs.cost_model import COEFFICIENTS, CostModel
from freescale.balance.costs.non_negative import UNKNOWNS, BoolArray, solve_grams, solve_rows
from freescale.balance.work import WHOLE, SampleWork
from freescale.errors import DataError

FOLDS = 5
FEWEST_STEPS = 10
# Huber's constant: residuals beyond this many standard deviations lose weight (95 % efficient on clean data).
HUBER = 1.345
# Steps further off than this many standard deviations are pauses of the machine, not costs of samples.
OUTLIER = 6.0
# Weights of steps settle within a few rounds; a change below the second number moves no coefficient that matters.
REWEIGHTINGS = 12
SETTLED = 1e-6


class MeasuredStep(NamedTuple):
    """One rank's batch and its compute time: number of samples, sums of lengths and of their squares."""

    num_samples: int
    tokens: int
    squares: float
    ms: float

    @classmethod
    def of(
        cls, lengths: Sequence[int] | FloatArray | IntArray, *, ms: float, work: SampleWork = WHOLE
    ) -> MeasuredStep:
        """The measured step of a batch with these lengths."""
        sizes = np.asarray(lengths)
        return cls(
            num_samples=len(sizes),
            tokens=int(work.tokens(sizes).sum()),
            squares=float(work.squares(sizes).sum()),
            ms=ms,
        )


@dataclass(frozen=True)
class CostFit:
    """A fitted model and how far to trust it.

    Args:
        model: the model; its `error` is the one below.
        error: median relative error on steps the fit had not seen.
        worst_error: the 90th percentile of the same.
        num_steps: steps used.
        num_outliers: steps left out as pauses.
    """

    model: CostModel
    error: float
    worst_error: float
    num_steps: int
    num_outliers: int


def fit_cost_model(
    steps: Iterable[MeasuredStep],
    *,
    hardware: str = "",
    model: str = "",
    prior: CostModel | None = None,
    prior_steps: float = 0.0,
) -> CostFit:
    """Non-negative least squares on relative errors, deaf to pauses, with a cross-validated error.

    Args:
        steps: at least 10 measured steps, of unlike lengths if lengths are to be told from counts.
        hardware: name of the device, kept with the model.
        model: name of the model, kept with the model.
        prior: a model to stay near where the steps do not tell.
        prior_steps: how many measured steps the prior is worth.

    Raises:
        DataError: too few steps, or times that are not positive.
    """
    table = _as_table(steps)
    return _fit(table, hardware=hardware, model=model, prior=prior, prior_steps=prior_steps)


def _fit(
    table: FloatArray, *, hardware: str, model: str, prior: CostModel | None, prior_steps: float
) -> CostFit:
    ratios, scale = _relative(table)
    anchor = (
        np.zeros(UNKNOWNS) if prior is None else np.array([getattr(prior, name) for name in COEFFICIENTS])
    )
    near = _Nearness(anchor * scale, num_steps=0.0 if prior is None else prior_steps)
    everything = np.ones((1, len(ratios)), dtype=np.bool_)
    (coefficients,), (inliers,) = _robust(ratios, everything, near)
    errors = _held_out_errors(ratios[inliers], near)
    coefficients = coefficients / scale
    if not coefficients[1:].any():
        raise DataError(
            "The measured steps do not show what a sample costs: time does not grow with samples or tokens.",
            next_step="measure batches of different sizes",
        )
    error = float(np.median(errors))
    names = dict(zip(COEFFICIENTS, coefficients.tolist()))
    return CostFit(
        model=CostModel(**names, hardware=hardware, model=model, error=error),
        error=error,
        worst_error=float(np.quantile(errors, 0.9)),
        num_steps=int(inliers.sum()),
        num_outliers=int((~inliers).sum()),
    )


def _as_table(steps: Iterable[MeasuredStep]) -> FloatArray:
    """[n, 4] the numbers of the steps: samples, tokens, squares, milliseconds."""
    rows = list(steps)
    if len(rows) < FEWEST_STEPS:
        raise DataError(
            "Too few measured steps to fit a cost model.", got=len(rows), allowed=f"at least {FEWEST_STEPS}"
        )
    table = table_of(rows)
    if not np.isfinite(table).all() or (table[:, 3] <= 0).any() or (table < 0).any():
        raise DataError("Measured steps must have positive times and finite, non-negative sums.")
    return table


def table_of(steps: Sequence[MeasuredStep]) -> FloatArray:
    """[n, 4] the numbers of any steps; four times as fast as `np.array`, which looks at every number twice."""
    numbers = np.fromiter(itertools.chain.from_iterable(steps), np.float64, 4 * len(steps))
    return numbers.reshape(len(steps), 4)


def _relative(table: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[n, 5] the terms of the model relative to the time of their step, and the goal: 1; and the unit of each term.

    In these units the terms are alike in size; coefficients are to be divided by them.
    """
    terms = np.column_stack((np.ones(len(table)), table[:, :3])) / table[:, 3:]
    scale = np.sqrt(np.square(terms).mean(axis=0))
    scale[scale == 0] = 1.0
    return np.column_stack((terms / scale, np.ones(len(table)))), scale


@dataclass(frozen=True)
class _Nearness:
    """What a fit stays near where its steps do not tell.

    Args:
        anchor: [4] coefficients.
        num_steps: how many measured steps they are worth.
    """

    anchor: FloatArray
    num_steps: float

    def rows(self, ratios: FloatArray, used: BoolArray) -> FloatArray:
        """[k, 4, 5] rows for each fit: what typical steps would say, one for each coefficient."""
        rows = np.zeros((len(used), UNKNOWNS, UNKNOWNS + 1))
        hidden, middle = _hidden(used), _middle(used)
        for column in range(UNKNOWNS):
            if not ratios[:, column].any():
                rows[:, column, column] = 1.0  # nothing is known of it: 0
            elif self.num_steps > 0:
                typical = _medians(ratios[:, column] + hidden, middle)
                rows[:, column, column] = typical * np.sqrt(self.num_steps)
                rows[:, column, UNKNOWNS] = rows[:, column, column] * self.anchor[column]
        return rows


def _robust(ratios: FloatArray, used: BoolArray, near: _Nearness) -> tuple[FloatArray, BoolArray]:
    """Coefficients by reweighting, and which steps are not pauses: [k, 4] and [k, n], for k fits side by side.

    Args:
        ratios: [n, 5] as `_relative` gives them.
        used: [k, n] the steps that each fit may see.
        near: what all of them stay near.
    """
    anchors, columns = near.rows(ratios, used), np.ascontiguousarray(ratios.T)
    known = anchors.transpose(0, 2, 1) @ anchors
    products = (columns[:, None] * columns).reshape(-1, len(ratios)).T
    hidden, middle = _hidden(used), _middle(used)
    weights, coefficients = used.astype(np.float64), np.ones((len(used), UNKNOWNS))
    for _ in range(REWEIGHTINGS):
        grams = (weights @ products).reshape(known.shape) + known
        coefficients, doubtful = solve_grams(grams, coefficients > 0)
        for fit in np.flatnonzero(doubtful):
            rows = ratios * np.sqrt(weights[fit])[:, None]
            coefficients[fit] = solve_rows(np.concatenate((rows, anchors[fit])))
        distance = np.abs(coefficients @ columns[:UNKNOWNS] - 1.0) + hidden
        # Pauses only make a step longer; the spread comes from all steps by the median, which they cannot
        # move.
        spread = np.maximum(1.4826 * _medians(distance, middle), 1e-9)[:, None]
        inliers = distance <= OUTLIER * spread
        before, weights = weights, inliers * (HUBER * spread / np.maximum(distance, HUBER * spread))
        if np.abs(weights - before).max() < SETTLED:
            break
    return coefficients, inliers


def _hidden(used: BoolArray) -> FloatArray:
    """[k, n] what puts the steps that a fit may not see behind all others."""
    return np.where(used, 0.0, np.inf)


def _middle(used: BoolArray) -> IntArray:
    """[2, k] the places of the median among the steps that each fit may see, in order."""
    counts = used.sum(axis=1)
    return np.stack(((counts - 1) // 2, counts // 2))


def _medians(values: FloatArray, middle: IntArray) -> FloatArray:
    """[k] the median of each row of [k, n]."""
    ordered = np.partition(values, middle.ravel(), axis=1)
    return np.asarray(ordered[np.arange(len(values)), middle].sum(axis=0) / 2)


def _held_out_errors(ratios: FloatArray, near: _Nearness) -> FloatArray:
    """Relative error of every step under a fit to the other folds."""
    place = np.arange(len(ratios))
    fold = place % FOLDS
    coefficients, _ = _robust(ratios, fold != np.arange(FOLDS)[:, None], near)
    return np.abs((coefficients[fold] * ratios[:, :UNKNOWNS]).sum(axis=1) - 1.0)


class OnlineCostModel:
    """Keeps the cost model true to the run: remembers recent steps, knows its error, refits when asked.

    It never changes the model by itself. All ranks must plan with the same model to the last bit, so a
    trainer gathers `recent_steps()` of the ranks at fixed steps, lets one of them `refit` and sends its model
    to all.

    Args:
        model: the model to begin with.
        window: steps remembered.
        prior_steps: measured steps the current model is worth. Balanced batches are all alike, so a few steps
            alone do not tell tokens from squares.
    """

    def __init__(
        self, model: CostModel | None = None, *, window: int = 256, prior_steps: float = 8.0
    ) -> None:
        self.model = CostModel.default() if model is None else model
        self.prior_steps = prior_steps
        self._steps: deque[MeasuredStep] = deque(maxlen=window)

    def observe(self, *, num_samples: int, tokens: int, squares: float, ms: float) -> None:
        """Remember a measured step; steps without samples or time tell nothing and are passed over."""
        if num_samples > 0 and np.isfinite(ms) and ms > 0:
            self._steps.append(MeasuredStep(num_samples=num_samples, tokens=tokens, squares=squares, ms=ms))

    def recent_steps(self) -> list[MeasuredStep]:
        """The remembered steps, oldest first."""
        return list(self._steps)

    @property
    def error(self) -> float | None:
        """Median relative error of the model on the remembered steps, after scaling it to their speed.

        Scaled, because only the relative cost of samples matters to the balance. None before the first step.
        """
        if not self._steps:
            return None
        return _shape_error(self.model, table_of(self._steps))

    def refit(self, steps: Sequence[MeasuredStep] | None = None) -> CostModel:
        """Fit to the given steps (default: the remembered ones) and keep the result if it predicts better."""
        given = self.recent_steps() if steps is None else list(steps)
        if len(given) < FEWEST_STEPS:
            return self.model
        table = _as_table(given)
        factor = _speed_factor(self.model, table)
        scaled = {name: getattr(self.model, name) * factor for name in COEFFICIENTS}
        fit = _fit(
            table,
            hardware=self.model.hardware,
            model=self.model.model,
            prior=CostModel(**scaled),
            prior_steps=self.prior_steps,
        )
        now = _shape_error(self.model, table)
        better = fit.error < now
        self.model = fit.model if better else replace(self.model, **scaled, error=now)
        return self.model


def _speed_factor(model: CostModel, table: FloatArray) -> float:
    return float(np.median(table[:, 3] / np.maximum(model.batches_ms(table), 1e-12)))


def _shape_error(model: CostModel, table: FloatArray) -> float:
    scaled = model.batches_ms(table) * _speed_factor(model, table)
    return float(np.median(np.abs(scaled / table[:, 3] - 1.0)))
