"""The fit of the cost model written down plainly, one `lstsq` for every support, reweighting and fold."""

from __future__ import annotations

import itertools

import numpy as np

from freescale.balance.costs.cost_fit import FOLDS, HUBER, OUTLIER, REWEIGHTINGS

Anchor = tuple[np.ndarray, float]
"""Coefficients to stay near, and the number of steps that they are worth."""


def slow_fit(
    terms: np.ndarray, times: np.ndarray, near: Anchor | None
) -> tuple[np.ndarray, np.ndarray, float]:
    """[4] coefficients, [n] which steps are no pauses, and the median error on steps the fit had not seen."""
    coefficients, inliers = _robust(terms, times, near)
    terms, times = terms[inliers], times[inliers]
    fold = np.arange(len(times)) % FOLDS
    errors = np.empty(len(times))
    for number in range(FOLDS):
        inside = fold == number
        others, _ = _robust(terms[~inside], times[~inside], near)
        errors[inside] = np.abs(terms[inside] @ others / times[inside] - 1.0)
    return coefficients, inliers, float(np.median(errors))


def _robust(terms: np.ndarray, times: np.ndarray, near: Anchor | None) -> tuple[np.ndarray, np.ndarray]:
    weights = np.ones(len(times))
    for _ in range(REWEIGHTINGS):
        coefficients = _non_negative(terms, times, weights, near)
        residuals = terms @ coefficients / times - 1.0
        spread = max(1.4826 * float(np.median(np.abs(residuals))), 1e-9)
        distance = np.abs(residuals) / spread
        inliers = distance <= OUTLIER
        weights = np.where(inliers, np.minimum(1.0, HUBER / np.maximum(distance, 1e-9)), 0.0)
    return coefficients, inliers


def _non_negative(
    terms: np.ndarray, times: np.ndarray, weights: np.ndarray, near: Anchor | None
) -> np.ndarray:
    rows, goal = terms * (np.sqrt(weights) / times)[:, None], np.sqrt(weights)
    if near is not None:
        typical = np.diag(np.median(terms / times[:, None], axis=0)) * np.sqrt(near[1])
        rows, goal = np.concatenate((rows, typical)), np.concatenate((goal, typical @ near[0]))
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
