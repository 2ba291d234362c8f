"""Metrics as sums that ranks can add up: HR, NDCG, MRR from ranks; AUC, NE, log loss from predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

CUTOFFS = (10, 50, 200)
"""Where lists are cut unless a recipe says otherwise."""

NEVER = torch.iinfo(torch.int64).max
"""The rank of a target that is not recommended at all: it was seen and seen items are filtered, or it is new."""

_NUM_BINS = 1 << 17


def full_ranking(cutoffs: Sequence[int] = CUTOFFS) -> tuple[str, ...]:
    """Names of what full ranking gives; the first decides unless another is named."""
    return (*(f"{name}@{k}" for name in ("ndcg", "hr") for k in cutoffs), "mrr")


FULL_RANKING = full_ranking()
"""What a head that ranks names among its metrics; a recipe with other cutoffs gives those instead."""


class RankingQuality:
    """HR@k, NDCG@k and MRR from the rank of each user's target (0 = first, `NEVER`: not recommended).

    Args:
        cutoffs: every k.
    """

    def __init__(self, cutoffs: Sequence[int] = CUTOFFS) -> None:
        self.cutoffs = tuple(cutoffs)
        self.sums = torch.zeros(2 * len(self.cutoffs) + 2, dtype=torch.float64)

    def update(self, ranks: Tensor) -> None:
        """Add users by the rank of their target among all candidates."""
        ranks = ranks.detach().cpu()
        place = ranks.double()
        gain = 1 / torch.log2(place + 2)
        hits = [(ranks < k).double() for k in self.cutoffs]
        reciprocal = torch.where(ranks == NEVER, 0.0, 1 / (place + 1))
        parts = [*hits, *(hit * gain for hit in hits), reciprocal, torch.ones_like(place)]
        self.sums += torch.stack([part.sum() for part in parts])

    def values(self) -> dict[str, float]:
        """Means over all users added so far."""
        total = max(self.sums[-1].item(), 1.0)
        names = [f"{name}@{k}" for name in ("hr", "ndcg") for k in self.cutoffs] + ["mrr"]
        return {name: value / total for name, value in zip(names, self.sums.tolist())}


class BinaryQuality:
    """AUC, normalised entropy, calibration and log loss of one binary task, from a histogram of predictions.

    The histogram has 2^17 bins over the probability, so AUC is exact up to pairs that fall into one bin.

    Args:
        sums: where to add, zeros [NUM_SUMS] of float64; its own unless given.
    """

    NUM_SUMS = 2 * _NUM_BINS + 4

    def __init__(self, sums: Tensor | None = None) -> None:
        self.sums = torch.zeros(self.NUM_SUMS, dtype=torch.float64) if sums is None else sums

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add predictions; a NaN counts as the wrong answer."""
        logits, labels = logits.detach().cpu().double().flatten(), labels.detach().cpu().double().flatten()
        probability = torch.where(logits.isnan(), 1 - labels, torch.sigmoid(logits))
        bins = (probability * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
        self.sums[:_NUM_BINS].index_add_(0, bins, labels)
        self.sums[_NUM_BINS : 2 * _NUM_BINS].index_add_(0, bins, 1 - labels)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        self.sums[2 * _NUM_BINS :] += torch.stack(
            [loss, labels.sum(), probability.sum(), torch.tensor(float(len(labels)))]
        )

    def values(self) -> dict[str, float | None]:
        """AUC (None with one class only), normalised entropy, calibration, log loss."""
        positive, negative = self.sums[:_NUM_BINS], self.sums[_NUM_BINS : 2 * _NUM_BINS]
        loss, num_positive, predicted, total = self.sums[2 * _NUM_BINS :].tolist()
        below = negative.cumsum(0) - negative
        pairs = num_positive * (total - num_positive)
        wins = float((positive * (below + negative / 2)).sum())
        rate = num_positive / total if total else 0.0
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) if 0 < rate < 1 else None
        return {
            "auc": wins / pairs if pairs else None,
            "ne": loss / total / entropy if entropy else None,
            "calibration": predicted / num_positive if num_positive else None,
            "logloss": loss / total if total else None,
        }
