"""Histories in memory as a source: lists of items, for programs and notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from freescale.data.source import Histories, IntArray, ItemCatalog
from freescale.errors import DataError
from freescale.jagged import offsets_of, spans

_TRAIN_ENDS_BEFORE = 2  # the last two events of a history are for validation and test


class ListedHistories:
    """Histories given as lists of item ids, oldest first.

    Args:
        histories: one list a user, or user -> list; or with more columns, one mapping a user with "item" and, say,
            "time" (whole seconds since 1970) and "action" beside it, all of the same length.
        name: what the data set is called.

    Examples:
        >>> ListedHistories([[3, 1, 4, 1, 5], [9, 2, 6, 5]])
        >>> ListedHistories([{"item": [3, 1, 4, 1], "time": [10, 20, 30, 40]}])
    """

    def __init__(
        self, histories: Sequence[Any] | Mapping[int, Any], *, name: str = "histories in memory"
    ) -> None:
        self.name = name
        users = list(histories) if isinstance(histories, Mapping) else range(len(histories))
        listed = list(histories.values()) if isinstance(histories, Mapping) else list(histories)
        columns = [each if isinstance(each, Mapping) else {"item": each} for each in listed]
        if not columns or any(set(each) != set(columns[0]) or "item" not in each for each in columns):
            raise DataError(
                "histories must be lists of items, or mappings that all have the same columns, 'item' among them",
                got=f"{len(listed)} histories",
            )
        self.features = ("item", *(key for key in columns[0] if key != "item"))
        self._users = np.asarray(users, dtype=np.int64)
        sizes = [len(each["item"]) for each in columns]
        for number, each in enumerate(columns):
            if any(len(values) != sizes[number] for values in each.values()):
                raise DataError("columns of a history must have the same length", got=f"history {number}")
        self._offsets = offsets_of(sizes)
        self._columns: dict[str, npt.NDArray[np.generic]] = {
            key: np.concatenate([np.asarray(each[key]) for each in columns if len(each[key])])
            if sum(sizes)
            else np.zeros(0)
            for key in self.features
        }
        for key in {"item", "time"} & set(self.features):
            values = self._columns[key]
            if values.dtype.kind not in "iu":
                raise DataError(
                    f"{key}s in lists must be whole numbers",
                    got=f"{values.dtype} {values[:3]}",
                    next_step="number them; or write them to a file, whose ids may be of any kind: `freescale prepare`",
                )
            self._columns[key] = values.astype(np.int64)

    @property
    def lengths(self) -> IntArray:
        """Events of each history."""
        return np.diff(self._offsets)

    @property
    def groups(self) -> IntArray:
        """All histories are as cheap to read."""
        return np.array([len(self._users)])

    @cached_property
    def items(self) -> ItemCatalog:
        """The items that occur."""
        items: Any = self._columns["item"]
        ids, counts = np.unique(items, return_counts=True)
        left = np.repeat(self._offsets[1:], self.lengths) - np.arange(len(items))
        trained = items[left > _TRAIN_ENDS_BEFORE]
        train_counts = np.bincount(np.searchsorted(ids, trained), minlength=len(ids))
        return ItemCatalog(
            ids=ids, counts=counts.astype(np.int64), train_counts=train_counts.astype(np.int64)
        )

    def read(self, rows: Sequence[int] | IntArray) -> Histories:
        """The histories of these rows, in the order asked for."""
        rows = np.asarray(rows, dtype=np.int64)
        index, offsets = spans(self._offsets[rows], self.lengths[rows])
        columns = {key: values[index] for key, values in self._columns.items()}
        return Histories(users=self._users[rows], offsets=offsets, columns=columns)
