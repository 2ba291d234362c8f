"""Metrics of predictions by their exact definitions, in numpy; every function takes one array a column.

Weights w, labels y, predictions p. Pairs count w_i * w_j; equal predictions count as half a win.

    auc             pairs of a positive and a negative that p puts in order, over all such pairs
    grouped_auc     the auc of every group, averaged: evenly, and by the groups' weight
    xauc            pairs of different y that p puts in order, over all such pairs; for numbers
    deciles         sums of w p and w y in ten parts of rising p

What a function returns does not depend on the order of its rows beyond rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class GroupedAuc(NamedTuple):
    """Averages over the groups with both classes.

    Args:
        even: every group counts once; None where no group has both classes.
        weighted: every group counts as much as its rows weigh.
        share: weight of the rows in such groups, of all.
    """

    even: float | None
    weighted: float | None
    share: float


def auc(predictions: Floats, labels: Floats, weights: Floats) -> float | None:
    """Area under the ROC curve with ties as half; None where one class has no weight."""
    found = grouped_auc(np.zeros(len(predictions), np.int64), predictions, labels, weights)
    return found.even


def grouped_auc(groups: Ints, predictions: Floats, labels: Floats, weights: Floats) -> GroupedAuc:
    """Averages of the AUC of every group."""
    if not len(groups):
        return GroupedAuc(None, None, 0.0)
    order = np.lexsort((predictions, groups))
    groups, predictions = groups[order], predictions[order]
    # Runs of equal predictions inside a group.
    fresh = np.concatenate([[True], groups[1:] != groups[:-1]])
    first = np.flatnonzero(fresh | np.concatenate([[True], predictions[1:] != predictions[:-1]]))
    positive = np.add.reduceat((weights * labels)[order], first)
    negative = np.add.reduceat((weights * (1 - labels))[order], first)
    begin = np.flatnonzero(fresh[first])
    below = _sums_before(negative, begin)
    wins = np.add.reduceat(positive * (below + negative / 2), begin)
    positives, negatives = np.add.reduceat(positive, begin), np.add.reduceat(negative, begin)
    both = (positives > 0) & (negatives > 0)
    total = positives + negatives
    if not both.any():
        return GroupedAuc(None, None, 0.0)
    values, own = wins[both] / (positives[both] * negatives[both]), total[both]
    return GroupedAuc(
        float(values.mean()), float((values * own).sum() / own.sum()), float(own.sum() / total.sum())
    )


def _sums_before(values: Floats, begin: Ints) -> Floats:
    """Sum of the values before each one in its group; groups begin at `begin`.

    Group by group the sums begin at zero, so that one group's rounding is not another's.
    """
    sums = np.cumsum(values) - values
    counts = np.diff(begin, append=len(values))
    found = sums - np.repeat(sums[begin], counts)
    # Whole numbers are exact as they are; others are added up anew where a large sum lies before.
    if np.array_equal(values, np.round(values)) or len(begin) == 1:
        return found
    for start, count in zip(begin[1:].tolist(), counts[1:].tolist()):
        own = values[start : start + count]
        found[start : start + count] = np.cumsum(own) - own
    return found


def xauc(predictions: Floats, labels: Floats, weights: Floats) -> float | None:
    """Share of the pairs with different labels that predictions put in order; None where all labels are equal."""
    if not len(labels):
        return None
    if np.isnan(predictions).any():
        return float("nan")
    order = np.lexsort((predictions, labels))
    predictions, labels, weights = predictions[order], labels[order], weights[order]
    rank: Ints = np.unique(predictions, return_inverse=True)[1].astype(np.int64)
    wins, pairs = _ordered_pairs(rank, weights), _all_pairs(weights)
    # Pairs of one label lie side by side, in the order of predictions: what they gave is taken off again.
    first = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1]]))
    equal = np.flatnonzero(np.concatenate([[True], (labels[1:] != labels[:-1]) | (rank[1:] != rank[:-1])]))
    same = (_squares(weights, first) - float((weights**2).sum())) / 2
    tied = (_squares(weights, equal) - float((weights**2).sum())) / 2
    wins, pairs = wins - (same - tied / 2), pairs - same
    return wins / pairs if len(first) > 1 and pairs > 0 else None


def _squares(weights: Floats, first: Ints) -> float:
    return float((np.add.reduceat(weights, first) ** 2).sum())


def _all_pairs(weights: Floats) -> float:
    return (float(weights.sum()) ** 2 - float((weights**2).sum())) / 2


def _ordered_pairs(rank: Ints, weights: Floats) -> float:
    """Weight of the pairs i < j with rank_i < rank_j, and half of that with equal ranks.

    As merge sort counts them: in blocks of twice the size in every round, pairs of the left half and the right one.
    """
    wins, size, count = 0.0, 1, len(rank)
    index, most = np.arange(count), int(rank.max()) + 1
    while size < count:
        block = index // (2 * size)
        key = block * most + rank
        order = np.argsort(key, kind="stable")
        key, left = key[order], (index[order] // size) % 2 == 0
        before = np.concatenate([[0.0], np.cumsum(np.where(left, weights[order], 0.0))])
        own, later = key[~left], weights[order][~left]
        start = before[np.searchsorted(key, block[order][~left] * most)]
        less, less_equal = before[np.searchsorted(key, own)], before[np.searchsorted(key, own, side="right")]
        wins += float((later * ((less + less_equal) / 2 - start)).sum())
        size *= 2
    return wins


def deciles(predictions: Floats, labels: Floats, weights: Floats) -> npt.NDArray[Any]:
    """[10, 2] sums of w p and w y in ten parts of about equal weight, by rising p; equal p are in one part."""
    order = np.argsort(predictions, kind="stable")
    p, w = predictions[order], weights[order]
    wp, wy = w * p, w * labels[order]
    first = np.flatnonzero(np.concatenate([[True], p[1:] != p[:-1]])) if len(p) else np.zeros(0, np.int64)
    sums = np.zeros((10, 2))
    if len(first):
        own = np.add.reduceat(w, first)
        part = part_of(own)
        np.add.at(sums[:, 0], part, np.add.reduceat(wp, first))
        np.add.at(sums[:, 1], part, np.add.reduceat(wy, first))
    return sums


def part_of(weights: Floats) -> Ints:
    """The tenth that each of some ascending values belongs to: how much weight lies before its middle."""
    middle = np.cumsum(weights) - weights / 2
    found: Ints = np.minimum(middle * 10 / weights.sum(), 9).astype(np.int64)
    return found
