"""What a data set with features is besides histories: its schema, its statistics, and the features of its items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from freescale.data.columns.lists import Column, Lists
from freescale.data.features.feature_statistics import Statistics
from freescale.data.schema.feature import Feature, Schema, legacy_schema
from freescale.data.source import IntArray, SequenceSource


@runtime_checkable
class FeatureSource(Protocol):
    """A source that knows more of events, items and users than item, time and action.

    Its histories hold columns of all features of events and users; those of items are asked for by index. Values are
    raw: nothing is scaled, put into buckets or crossed. NONE stands for an id, and NaN for a number, that is missing.
    """

    @property
    def schema(self) -> Schema:
        """What there is."""

    @property
    def statistics(self) -> Statistics:
        """Means and deviations of the training part, and the longest lists."""

    def item_features(self) -> ItemFeatures:
        """What is known of the items of its catalogue."""

    def known_ids(self, table: str, /) -> IntArray | None:
        """All ids of features that share a table, ascending; None where they were not written down."""


def schema_of(source: SequenceSource) -> Schema:
    """The schema of a source; of one that says nothing: items, and where it has them times and actions."""
    return source.schema if isinstance(source, FeatureSource) else legacy_schema(source.features)


class ItemFeatures:
    """Features of the items of a catalogue, by their index in it; held in memory.

    Args:
        columns: one a feature.
        longest: values of the longest list of each feature that has lists.
        rows: where the items of the catalogue stand in the columns, if they are not all of them.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        longest: Mapping[str, int],
        rows: IntArray | None = None,
    ) -> None:
        self._columns, self._longest, self._rows = dict(columns), dict(longest), rows

    def take(self, index: IntArray, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
        """The features of the items with these indices; lists as [n, longest], NONE behind their ends."""
        where = index if self._rows is None else self._rows[index]
        found = {}
        for name in names:
            column = self._columns[name]
            found[name] = (
                column.padded(where, self._longest[name]) if isinstance(column, Lists) else column[where]
            )
        return found

    def of(self, rows: IntArray) -> ItemFeatures:
        """The same for a part of the catalogue."""
        return ItemFeatures(self._columns, self._longest, rows if self._rows is None else self._rows[rows])


def padded_column(column: Column, longest: int) -> npt.NDArray[Any]:
    """A column as an array: lists as [n, longest], NONE behind their ends."""
    return column.padded(np.arange(len(column)), longest) if isinstance(column, Lists) else column


def empty_column(feature: Feature, size: int, statistics: Statistics) -> npt.NDArray[Any]:
    """Room for so many values of a feature, as arrays hold them."""
    if feature.kind == "vector":
        return np.empty((size, feature.width or 1), dtype=np.float32)
    if feature.kind == "ids":
        return np.empty((size, int(statistics[feature.name]["longest"])), dtype=np.int64)
    return np.empty(size, dtype=np.float32 if feature.kind == "number" else np.int64)
