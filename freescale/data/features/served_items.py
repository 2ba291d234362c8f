"""ServedItems: what is left of a data set in a service: its items, its schema and its statistics, and no history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from freescale.data.columns.lists import Column
from freescale.data.features.feature_source import ItemFeatures
from freescale.data.features.feature_statistics import Statistics
from freescale.data.schema.feature import Schema
from freescale.data.source import Histories, IntArray, ItemCatalog
from freescale.errors import DataError


class ServedItems:
    """A source of features without users; implements `SequenceSource` and `FeatureSource`.

    Args:
        ids: of the items, ascending.
        schema: of what is served.
        statistics: of the training part.
        columns: what crosses need of items, a value an item.
    """

    name = "export"
    features: tuple[str, ...] = ("item",)

    def __init__(
        self, ids: IntArray, *, schema: Schema, statistics: Statistics, columns: Mapping[str, Column]
    ) -> None:
        none = np.zeros(len(ids), dtype=np.int64)
        self._items = ItemCatalog(ids=ids, counts=none, train_counts=none)
        self._schema, self._statistics, self._columns = schema, statistics, columns

    @property
    def schema(self) -> Schema:
        """What requests say, and what crosses are made of."""
        return self._schema

    @property
    def statistics(self) -> Statistics:
        """As they were when the model was trained."""
        return self._statistics

    @property
    def items(self) -> ItemCatalog:
        """Ids alone: how often items occurred is not kept."""
        return self._items

    @property
    def lengths(self) -> IntArray:
        """There are no histories."""
        return np.zeros(0, dtype=np.int64)

    @property
    def groups(self) -> IntArray:
        """There are no histories."""
        return np.zeros(0, dtype=np.int64)

    def item_features(self) -> ItemFeatures:
        """What crosses need of items."""
        return ItemFeatures(self._columns, {})

    def known_ids(self, table: str, /) -> IntArray | None:
        """Tables say themselves which ids they have."""
        return None

    def read(self, rows: Sequence[int] | IntArray) -> Histories:
        """Histories come with requests."""
        raise DataError("an export holds no histories")
