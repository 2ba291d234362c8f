"""TaskQuality: predictions of one task, collected over an evaluation and over the ranks, and what they are worth.

Up to `limit` rows over all ranks are kept, brought together and measured exactly, in one order whatever the number of
ranks: every number is the same to the bit. Beyond it

    sums      log loss, NE, calibration, MSE, MAE: of all rows, the same but for rounding
    AUC       of all rows by their bin: 2^17 bins of the logit between -16 and 16, a bin counts as equal. `auc_error`
              bounds what that can be off by: half of the pairs that share a bin, of all pairs
    GAUC,     of some users, all their rows: those whose hashed number begins with so many zero bits that at most
    XAUC      `limit` rows remain. `sampled` is the share of users
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from freescale.model.quality.prediction_metrics import Floats, Ints, auc, deciles, grouped_auc, part_of, xauc

TaskKind = Literal["binary", "number"]
LIMIT = 1 << 21
_BINS, _REACH = 1 << 17, 16.0


class AcrossRanks(Protocol):
    """What metrics need of the other ranks; every rank calls the same in the same order."""

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over the ranks; on the CPU."""

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one after the other; a rank may have any number of them."""


class Alone:
    """One rank."""

    def sum(self, values: Tensor) -> Tensor:
        """The values."""
        return values

    def gather(self, rows: Tensor) -> Tensor:
        """The rows."""
        return rows


class TaskQuality:
    """Collects predictions of one task.

    Args:
        kind: "binary": predictions are logits, labels 0 or 1; "number": predictions are numbers.
        limit: rows that are measured exactly.
    """

    def __init__(self, kind: TaskKind, *, limit: int = LIMIT) -> None:
        self.kind, self.limit = kind, limit
        self._parts: list[tuple[Floats, Ints]] = []
        self._count, self._level = 0, 0
        self._sums = torch.zeros(5, dtype=torch.float64)
        self._bins: Tensor | None = None

    def update(
        self,
        predictions: Tensor,
        labels: Tensor,
        *,
        weights: Tensor | None = None,
        users: Tensor | None = None,
        requests: Tensor | None = None,
    ) -> None:
        """Add rows. Those without weight are left out; a NaN of a binary task counts as the wrong answer.

        Args:
            predictions: [N] logits or numbers.
            labels: [N].
            weights: [N], 0 or more; 1 unless given.
            users: [N] whose rows they are; none are told apart unless given.
            requests: [N] which of them were asked for together.
        """
        columns = [predictions, labels, torch.ones_like(labels) if weights is None else weights]
        values = torch.stack([x.detach().cpu().double().flatten() for x in columns], dim=1).numpy()
        none = torch.full((len(values),), -1)
        keys = torch.stack([none if x is None else x.cpu().long() for x in (users, requests)], dim=1).numpy()
        real = values[:, 2] > 0
        self._add(values[real], keys[real])

    def _add(self, values: Floats, keys: Ints) -> None:
        self._sums += torch.from_numpy(self._sums_of(values))
        if self._bins is not None:
            self._bins += _binned(values)
        kept = _chosen(values, keys, self._level)
        self._parts.append((values[kept], keys[kept]))
        self._count += int(kept.sum())
        while self._count > self.limit:
            self._thin(self._level + 1)

    def _thin(self, level: int) -> None:
        """Keep the rows of fewer users; all of them are in the bins from now on."""
        if self.kind == "binary" and self._bins is None:
            # Nothing was dropped before.
            self._bins = sum((_binned(values) for values, _ in self._parts), start=_no_bins())
        self._level = level
        chosen = [(_chosen(*part, level), part) for part in self._parts]
        self._parts = [(values[kept], keys[kept]) for kept, (values, keys) in chosen]
        self._count = sum(len(values) for values, _ in self._parts)

    def merge(self, ranks: AcrossRanks) -> None:
        """Bring together what the ranks have collected; every rank has all of it afterwards."""
        level = int(ranks.gather(torch.tensor([self._level])).max())
        while True:
            if level > self._level:
                self._thin(level)
            total = int(ranks.sum(torch.tensor([self._count])))
            if total <= self.limit:
                break
            level = self._level + 1
        values = np.concatenate([np.zeros((0, 3)), *(part[0] for part in self._parts)])
        keys = np.concatenate([np.zeros((0, 2), np.int64), *(part[1] for part in self._parts)])
        values, keys = (ranks.gather(torch.from_numpy(x)).numpy() for x in (values, keys))
        order = np.lexsort((*values.T, *keys.T))
        self._parts, self._count = [(values[order], keys[order])], len(order)
        if self._level:
            self._sums = ranks.sum(self._sums)
            self._bins = None if self._bins is None else ranks.sum(self._bins)

    def values(self) -> dict[str, float | None]:
        """Every metric by its name; None where the rows do not define it."""
        values = np.concatenate([np.zeros((0, 3)), *(part[0] for part in self._parts)])
        keys = np.concatenate([np.zeros((0, 2), np.int64), *(part[1] for part in self._parts)])
        sums = self._sums.numpy() if self._level else self._sums_of(values)
        found = self._binary(values, keys, sums) if self.kind == "binary" else self._number(values, sums)
        if self._level:
            found["sampled"] = 2.0**-self._level
        return found

    def _binary(self, values: Floats, keys: Ints, sums: Floats) -> dict[str, float | None]:
        loss, positive, predicted, total = sums[:4].tolist()
        rate = positive / total if total else 0.0
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) if 0 < rate < 1 else None
        order, labels, weights = _order_of(values), values[:, 1], values[:, 2]
        found: dict[str, float | None] = {"auc": None, "ne": loss / total / entropy if entropy else None}
        if self._bins is None:
            found["auc"] = auc(order, labels, weights)
            parts = deciles(_probability(values), labels, weights)
        else:
            found["auc"], found["auc_error"] = _binned_auc(self._bins)
            parts = _binned_deciles(self._bins)
        for column, name in enumerate(("user", "request")):
            if len(keys) and (keys[:, column] >= 0).any():
                grouped = grouped_auc(keys[:, column], order, labels, weights)
                found[f"gauc_{name}"], found[f"gauc_{name}_even"] = grouped.weighted, grouped.even
                found[f"gauc_{name}_share"] = grouped.share
        found["calibration"] = predicted / positive if positive else None
        for number, (expected, seen) in enumerate(parts.tolist(), start=1):
            found[f"calibration_{number}"] = expected / seen if seen else None
        found["logloss"] = loss / total if total else None
        return found

    def _number(self, values: Floats, sums: Floats) -> dict[str, float | None]:
        squares, absolute, _, total = sums[:4].tolist()
        return {
            "mse": squares / total if total else None,
            "mae": absolute / total if total else None,
            "xauc": xauc(*values.T),
        }

    def _sums_of(self, values: Floats) -> Floats:
        """Log loss, w y, w p, w; or squared and absolute error, 0, w."""
        prediction, label, weight = values.T
        if self.kind == "binary":
            terms = [_loss(prediction, label), label, _probability(values), np.ones_like(label)]
        else:
            error = label - prediction
            terms = [error**2, np.abs(error), np.zeros_like(label), np.ones_like(label)]
        return np.array([*(float((weight * term).sum()) for term in terms), 0.0])


def _loss(logit: Floats, label: Floats) -> Floats:
    """Binary cross-entropy."""
    found: Floats = np.maximum(logit, 0) - logit * label + np.log1p(np.exp(-np.abs(logit)))
    return found


def _order_of(values: Floats) -> Floats:
    """Logits; for a NaN what is most wrong."""
    logit, label = values[:, 0], values[:, 1]
    return np.where(np.isnan(logit), np.where(label > 0.5, -np.inf, np.inf), logit)


def _probability(values: Floats) -> Floats:
    logit = _order_of(values)
    small = np.exp(-np.abs(logit))
    return np.where(logit >= 0, 1 / (1 + small), small / (1 + small))


def _chosen(values: Floats, keys: Ints, level: int) -> np.ndarray:
    """[N] whether a row is kept: its user's hashed number begins with `level` zero bits; without users its own."""
    if not level:
        return np.ones(len(values), bool)
    bits = np.ascontiguousarray(values).view(np.uint64)
    own = _hashed(_hashed(_hashed(bits[:, 0]) ^ bits[:, 1]) ^ bits[:, 2])
    code = np.where(keys[:, 0] >= 0, _hashed(keys[:, 0].astype(np.uint64)), own)
    return (code >> np.uint64(64 - level)) == 0


def _hashed(x: np.ndarray) -> np.ndarray:
    """Numbers of 64 bits, well mixed (splitmix64)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _no_bins() -> Tensor:
    return torch.zeros(3, _BINS, dtype=torch.float64)


def _binned(values: Floats) -> Tensor:
    """[3, bins] weight of positives and negatives, and w p, by the bin of their logit."""
    logit = np.clip(_order_of(values), -_REACH, _REACH)
    bins = np.minimum((logit + _REACH) * (_BINS / (2 * _REACH)), _BINS - 1).astype(np.int64)
    label, weight = values[:, 1], values[:, 2]
    sums = [weight * label, weight * (1 - label), weight * _probability(values)]
    return torch.from_numpy(np.stack([np.bincount(bins, column, minlength=_BINS) for column in sums]))


def _binned_auc(bins: Tensor) -> tuple[float | None, float | None]:
    """The AUC, and what it may be off by."""
    positive, negative, _ = bins.numpy()
    pairs = float(positive.sum()) * float(negative.sum())
    if not pairs:
        return None, None
    below = np.cumsum(negative) - negative
    shared = float((positive * negative).sum()) / 2
    return (float((positive * below).sum()) + shared) / pairs, shared / pairs


def _binned_deciles(bins: Tensor) -> Floats:
    positive, negative, predicted = bins.numpy()
    weight = positive + negative
    some = weight > 0
    sums = np.zeros((10, 2))
    part = part_of(weight[some])
    np.add.at(sums[:, 0], part, predicted[some])
    np.add.at(sums[:, 1], part, positive[some])
    return sums
