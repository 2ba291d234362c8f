"""What the reader must know of features and only all of the data can tell: means, deviations, the longest list."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from freescale.data.columns.lists import Column, Lists
from freescale.data.schema.feature import Feature

Statistics = Mapping[str, Mapping[str, float]]
"""Feature -> {"mean", "std"} of a number, {"longest"} of a list."""


class FeatureStatistics:
    """Gathers statistics part by part; the same for the same parts in the same order.

    Args:
        features: those that are looked at.
    """

    def __init__(self, features: Iterable[Feature]) -> None:
        chosen = [each for each in features if each.kind in ("number", "ids")]
        self._sums = {each.name: (0, 0.0, 0.0) for each in chosen if each.kind == "number"}
        self._longest = {each.name: 1 for each in chosen if each.kind == "ids"}

    def add(self, columns: Mapping[str, Column], train: npt.NDArray[np.bool_]) -> None:
        """Look at some more rows; only those to train on count for means."""
        for name, (count, mean, squares) in self._sums.items():
            column = columns.get(name)
            if column is None or isinstance(column, Lists):
                continue
            values = column[train].astype(np.float64)
            values = values[~np.isnan(values)]
            if not len(values):
                continue
            # Two means and sums of squares around them, put together without losing digits.
            own = float(values.mean())
            total, apart = count + len(values), own - mean
            squares += float(((values - own) ** 2).sum()) + apart**2 * count * len(values) / total
            self._sums[name] = (total, mean + apart * len(values) / total, squares)
        for name, longest in self._longest.items():
            column = columns.get(name)
            if isinstance(column, Lists) and len(column):
                self._longest[name] = max(longest, int(column.lengths.max()))

    def result(self) -> dict[str, dict[str, Any]]:
        """By feature; a number that never changes has the deviation 1."""
        found: dict[str, dict[str, Any]] = {}
        for name, (count, mean, squares) in self._sums.items():
            found[name] = {"mean": mean, "std": (math.sqrt(squares / count) if count else 0.0) or 1.0}
        return found | {name: {"longest": longest} for name, longest in self._longest.items()}
