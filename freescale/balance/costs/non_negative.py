"""Least squares with no coefficient below 0, for several small problems at once.

A problem of n rows and four unknowns is told by its 5 x 5 Gram matrix: the sums of products of its columns, the goal
being the fifth. Making it reads the rows once; every solution and every loss then follows from 25 numbers.

Four unknowns have fifteen supports; the best of those whose solution is non-negative is the answer.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from freescale.balance.arrays import FloatArray

BoolArray = npt.NDArray[np.bool_]

UNKNOWNS = 4
# A Gram matrix squares the condition of a problem. Where its smallest eigenvalue is this far below its largest, too few
# digits are left, and the rows themselves must be solved.
_SMALLEST_EIGENVALUE = 1e-6

_EYE = np.eye(UNKNOWNS)
_SUPPORTS: BoolArray = np.array(
    [
        [column in support for column in range(UNKNOWNS)]
        for size in range(1, UNKNOWNS + 1)
        for support in itertools.combinations(range(UNKNOWNS), size)
    ]
)
"""[15, 4] which coefficients are not 0, few first."""


def solve_grams(grams: FloatArray, support: BoolArray) -> tuple[FloatArray, BoolArray]:
    """The coefficients of each problem, and which of them must be solved from their rows instead.

    Args:
        grams: [k, 5, 5] sums of products of the columns of each problem, its goal last.
        support: [k, 4] a guess which coefficients are not 0. A right one saves looking at all fifteen.
    """
    left, right = grams[:, :UNKNOWNS, :UNKNOWNS], grams[:, :UNKNOWNS, UNKNOWNS]
    eigenvalues = np.linalg.eigvalsh(left)
    doubtful = eigenvalues[:, 0] < _SMALLEST_EIGENVALUE * eigenvalues[:, -1]
    if doubtful.any():
        left = np.where(doubtful[:, None, None], _EYE, left)
    solutions = _solve(left, right, support)
    # Best: nothing below 0, and nothing that was left out would make it better.
    slopes = (left @ solutions[:, :, None])[:, :, 0] - right
    wrong = ((solutions < 0) | ((slopes < 0) & ~support)).any(axis=1)
    if wrong.any():
        solutions[wrong] = _best(left[wrong], right[wrong])
    return solutions, doubtful


def _solve(left: FloatArray, right: FloatArray, support: BoolArray) -> FloatArray:
    """[..., 4] the solutions with these supports, 0 elsewhere."""
    inside = support[..., :, None] & support[..., None, :]
    solutions = np.linalg.solve(np.where(inside, left, _EYE), np.where(support, right, 0.0)[..., None])
    return np.asarray(solutions[..., 0])


def _best(left: FloatArray, right: FloatArray) -> FloatArray:
    """[k, 4] the best non-negative solutions, of all supports."""
    solutions = _solve(left[:, None], right[:, None], _SUPPORTS)
    gains = (solutions * right[:, None]).sum(axis=2)  # how far each one is below the loss of nothing at all
    gains[(solutions < 0).any(axis=2)] = -np.inf
    return np.asarray(solutions[np.arange(len(right)), gains.argmax(axis=1)])


def solve_rows(rows: FloatArray) -> FloatArray:
    """[4] the coefficients of one problem from its [n, 5] rows, goal last: slower, and right to the last digits.

    Columns that cannot be told apart share their effect (the shortest solution).
    """
    turned = np.asarray(np.linalg.qr(rows, mode="r"))  # turned so that five rows hold everything
    columns, goal = turned[:, :UNKNOWNS], turned[:, UNKNOWNS]
    # What counts as 0 depends on how many rows were added up.
    smallest = np.finfo(np.float64).eps * max(rows.shape)
    full = np.linalg.lstsq(columns, goal, rcond=smallest)[0]
    if (full >= 0).all():
        return np.asarray(full)
    best, best_loss = np.zeros(UNKNOWNS), np.inf
    for support in _SUPPORTS[:-1]:
        solution = np.linalg.lstsq(columns[:, support], goal, rcond=smallest)[0]
        loss = float(np.square(columns[:, support] @ solution - goal).sum())
        if (solution >= 0).all() and loss < best_loss * (1 - 1e-9):
            best, best_loss = np.zeros(UNKNOWNS), loss
            best[support] = solution
    return best
