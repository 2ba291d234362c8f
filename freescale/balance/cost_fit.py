"""Fits the cost model to measured steps, once from a profile or again and again from the run itself."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from freescale.balance.arrays import FloatArray, IntArray
from freescale.balance.cost_model import COEFFICIENTS, CostModel
from freescale.balance.work import WHOLE, SampleWork
from freescale.errors import DataError

FOLDS = 5
FEWEST_STEPS = 10
# Huber's constant: residuals beyond this many standard deviations lose weight (95 % efficient on clean data).
HUBER = 1.345
# Steps further off than this many standard deviations are pauses of the machine, not costs of samples.
OUTLIER = 6.0


@dataclass(frozen=True)
class MeasuredStep:
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
    terms, times = _as_arrays(steps)
    anchor = None if prior is None else np.array([getattr(prior, name) for name in COEFFICIENTS])
    coefficients, inliers = _robust(terms, times, anchor=anchor, anchor_weight=prior_steps)
    errors = _held_out_errors(terms[inliers], times[inliers], anchor=anchor, anchor_weight=prior_steps)
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


def _as_arrays(steps: Iterable[MeasuredStep]) -> tuple[FloatArray, FloatArray]:
    """[n, 4] terms of the model and [n] times."""
    rows = [(1.0, step.num_samples, step.tokens, step.squares, step.ms) for step in steps]
    if len(rows) < FEWEST_STEPS:
        raise DataError(
            "Too few measured steps to fit a cost model.", got=len(rows), allowed=f"at least {FEWEST_STEPS}"
        )
    table = np.asarray(rows, dtype=np.float64)
    if not np.isfinite(table).all() or (table[:, 4] <= 0).any() or (table < 0).any():
        raise DataError("Measured steps must have positive times and finite, non-negative sums.")
    return table[:, :4], table[:, 4]


def _robust(
    terms: FloatArray, times: FloatArray, *, anchor: FloatArray | None, anchor_weight: float
) -> tuple[FloatArray, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Coefficients by reweighting, and which steps are not pauses."""
    weights = np.ones(len(times))
    inliers = np.ones(len(times), dtype=np.bool_)
    coefficients = np.zeros(4)
    for _ in range(12):
        coefficients = _non_negative(terms, times, weights, anchor=anchor, anchor_weight=anchor_weight)
        residuals = terms @ coefficients / times - 1.0
        # Pauses only make a step longer; the spread comes from all steps by the median, which they cannot
        # move.
        spread = max(1.4826 * float(np.median(np.abs(residuals))), 1e-9)
        distance = np.abs(residuals) / spread
        inliers = distance <= OUTLIER
        weights = np.where(inliers, np.minimum(1.0, HUBER / np.maximum(distance, 1e-9)), 0.0)
    return coefficients, inliers


def _non_negative(
    terms: FloatArray,
    times: FloatArray,
    weights: FloatArray,
    *,
    anchor: FloatArray | None,
    anchor_weight: float,
) -> FloatArray:
    """Weighted least squares on relative errors with no coefficient below 0.

    Four coefficients have fifteen supports; the best of those whose solution is non-negative is the answer.
    """
    rows = terms * (np.sqrt(weights) / times)[:, None]
    goal = np.sqrt(weights)
    if anchor is not None and anchor_weight > 0:
        typical = np.diag(np.median(terms / times[:, None], axis=0)) * np.sqrt(anchor_weight)
        rows = np.concatenate((rows, typical))
        goal = np.concatenate((goal, typical @ anchor))
    scale = np.sqrt(np.square(rows).sum(axis=0))
    scale[scale == 0] = 1.0
    rows = rows / scale
    full = np.linalg.lstsq(rows, goal, rcond=None)[0]
    if (full >= 0).all():
        return full / scale
    best, best_loss = np.zeros(len(full)), np.inf
    for size in range(1, len(full)):
        for support in itertools.combinations(range(len(full)), size):
            columns = list(support)
            solution = np.linalg.lstsq(rows[:, columns], goal, rcond=None)[0]
            loss = float(np.square(rows[:, columns] @ solution - goal).sum())
            if (solution >= 0).all() and loss < best_loss * (1 - 1e-9):
                best, best_loss = np.zeros(len(full)), loss
                best[columns] = solution / scale[columns]
    return best


def _held_out_errors(
    terms: FloatArray, times: FloatArray, *, anchor: FloatArray | None, anchor_weight: float
) -> FloatArray:
    """Relative error of every step under a fit to the other folds."""
    fold = np.arange(len(times)) % FOLDS
    errors = np.empty(len(times))
    for number in range(FOLDS):
        inside = fold == number
        coefficients, _ = _robust(terms[~inside], times[~inside], anchor=anchor, anchor_weight=anchor_weight)
        errors[inside] = np.abs(terms[inside] @ coefficients / times[inside] - 1.0)
    return errors


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
        return _shape_error(self.model, self.recent_steps())

    def refit(self, steps: Sequence[MeasuredStep] | None = None) -> CostModel:
        """Fit to the given steps (default: the remembered ones) and keep the result if it predicts better."""
        given = self.recent_steps() if steps is None else list(steps)
        if len(given) < FEWEST_STEPS:
            return self.model
        factor = _speed_factor(self.model, given)
        scaled = {name: getattr(self.model, name) * factor for name in COEFFICIENTS}
        fit = fit_cost_model(
            given,
            hardware=self.model.hardware,
            model=self.model.model,
            prior=CostModel(**scaled),
            prior_steps=self.prior_steps,
        )
        now = _shape_error(self.model, given)
        better = fit.error < now
        self.model = fit.model if better else replace(self.model, **scaled, error=now)
        return self.model


def _predictions(model: CostModel, steps: Sequence[MeasuredStep]) -> FloatArray:
    return np.array(
        [model.batch_ms(num_samples=s.num_samples, tokens=s.tokens, squares=s.squares) for s in steps]
    )


def _speed_factor(model: CostModel, steps: Sequence[MeasuredStep]) -> float:
    return float(
        np.median(np.array([step.ms for step in steps]) / np.maximum(_predictions(model, steps), 1e-12))
    )


def _shape_error(model: CostModel, steps: Sequence[MeasuredStep]) -> float:
    times = np.array([step.ms for step in steps])
    return float(np.median(np.abs(_predictions(model, steps) * _speed_factor(model, steps) / times - 1.0)))
