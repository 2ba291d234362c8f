"""The part of a data set that a schema adds: columns of events and users in the shards, of items in items.parquet.

shard-*.parquet    a list a feature of events, a value a feature of users
items.parquet      a column a feature of items, behind item, count and train_count
words-TABLE.parquet    id (ascending), word: of ids that are text, a file a table
dataset.json       "schema", "statistics", and digests of all of these
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from freescale.data.columns.ids import IdKinds
from freescale.data.columns.lists import Column, plain_arrays, to_arrow
from freescale.data.features.feature_statistics import FeatureStatistics
from freescale.data.preparing.reading.side_table import SideTable
from freescale.data.schema.feature import Feature, Schema, legacy_schema, renamed_columns
from freescale.data.source import IntArray
from freescale.data.stored.digest import digest_arrays
from freescale.data.stored.manifest import CROSS_HASH, FEATURE_DTYPES
from freescale.errors import DataError

STOP, NONE_ROW = "stop", "none"
LACKING = (STOP, NONE_ROW)
"""What becomes of items and users of the events that their files lack."""
LEAVE, KEEP = "leave", "keep"
NEW_ITEMS = (LEAVE, KEEP)
"""What becomes of items of their file that no event names."""


def arrow_type(feature: Feature) -> Any:
    """Of a value of a feature in Parquet."""
    if feature.kind == "number":
        return pa.float32()
    if feature.kind == "vector":
        return pa.list_(pa.float32(), feature.width or 1)
    return pa.large_list(pa.int64()) if feature.kind == "ids" else pa.int64()


class FeatureWriter:
    """Writes the features of a schema.

    Args:
        schema: what there is.
        sides: tables of "item" and "user", where there are such files.
        kinds: of raw ids, by the name of their feature.
        lacking: "stop" where a file lacks an item or user of the events, or "none": its features are missing.
        new_items: "leave" out items of their file that no event names, or "keep" them in the catalogue.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        sides: Mapping[str, SideTable],
        kinds: IdKinds = MappingProxyType({}),
        lacking: str = STOP,
        new_items: str = LEAVE,
    ) -> None:
        self.schema = schema
        self._kinds = kinds
        self.users = schema.stored("user")
        self._items = schema.stored("item")
        self._sides = sides
        self._lacking, self._new_items = lacking, new_items
        self._num_new = 0
        self._lacked: dict[str, tuple[int, list[IntArray]]] = {}
        self._statistics = FeatureStatistics(schema)
        self._item_digest: str | None = None

    def event_type(self, name: str) -> Any:
        """The Arrow type of a column of events."""
        return (
            arrow_type(self.schema[name])
            if name in self.schema
            else pa.from_numpy_dtype(FEATURE_DTYPES[name])
        )

    def is_usual(self, name: str) -> bool:
        """Whether a column is what it is in a data set without a schema: an action may be something else."""
        return name not in self.schema or self.schema[name].kind in ("number", "time") or name == "item"

    def is_shared(self, table: str) -> bool:
        """Whether others than users and items have rows in their table: then it has more ids than those."""
        found = self.schema.tables.get(table)
        return found is not None and found.features != (table,)

    @property
    def user_types(self) -> list[tuple[str, Any]]:
        """The columns of users."""
        return [(each.name, arrow_type(each)) for each in self.users]

    def group(self, users: IntArray, lengths: IntArray, events: Mapping[str, Column]) -> dict[str, Column]:
        """Take the statistics of a row group; the features of its users."""
        ends = np.cumsum(lengths)
        train = np.ones(int(lengths.sum()), dtype=bool)
        train[ends - 1] = False
        train[ends[lengths >= 2] - 2] = False
        self._statistics.add(events, train)
        columns = self._take("user", users) if self.users else {}
        self._statistics.add(columns, np.ones(len(users), dtype=bool))
        return columns

    def catalogue(self, ids: IntArray, *counts: IntArray) -> tuple[IntArray, ...]:
        """Items and how often they occur; with those that only their file names, where they are kept."""
        if not self._items:
            return ids, *counts
        known = self._sides["item"].ids
        new = known[~np.isin(known, ids, assume_unique=True)]
        self._num_new = len(new)
        if self._new_items == LEAVE or not len(new):
            return ids, *counts
        every = np.concatenate([ids, new])
        order = np.argsort(every, kind="stable")
        filled = (np.concatenate([each, np.zeros(len(new), each.dtype)])[order] for each in counts)
        return every[order], *filled

    def items(self, ids: IntArray, train_counts: IntArray) -> dict[str, Any]:
        """The columns of the items of the catalogue."""
        columns = self._take("item", ids) if self._items else {}
        self._statistics.add(columns, train_counts > 0)
        if columns:
            arrays = [array for column in columns.values() for array in plain_arrays(column)]
            self._item_digest = digest_arrays(*arrays)
        return {name: to_arrow(column) for name, column in columns.items()}

    def check_rows(self, num_words: Mapping[str, int]) -> None:
        """With map: direct every id has a row of its own: refuse more words than rows.

        Args:
            num_words: different words of every table of text.
        """
        found = [
            f"{name}: {num_words[name]:,} different words, rows is {use.rows}"
            for name, use in self.schema.tables.items()
            if use.map == "direct" and use.rows is not None and num_words.get(name, 0) > use.rows
        ]
        if found:
            raise DataError(
                "With map: direct every id has a row of its own, and there are too few",
                got="; ".join(found),
                next_step="give the table more rows, or another map: hash or zero_collision",
            )

    def check(self, word_of: Callable[[str, IntArray], Sequence[object]]) -> list[str]:
        """Refuse items and users that their files lack, all of them in one error, or tell of them.

        Args:
            word_of: the ids of an owner as the input has them.
        """
        said = [
            f"{owner}s that {self._sides[owner].remarks[0].split(':')[0]} lacks: {count:,}, "
            f"such as {', '.join(map(repr, word_of(owner, np.concatenate(some)[:3])))}"
            for owner, (count, some) in self._lacked.items()
        ]
        if said and self._lacking == STOP:
            raise DataError(
                "Events have " + " and ".join(self._lacked) + "s that their files lack",
                got="; ".join(said),
                allowed="a row for every one of them; its features may be empty",
                next_step="add the rows, or let their features be missing (`--lacking none`)",
            )
        times = [each.name for owner in self._lacked for each in self._of(owner) if each.kind == "time"]
        if times:
            raise DataError("A time cannot be missing", got=f"{'; '.join(said)}; {', '.join(times)} of them")
        return [*(f"{line}: their features are missing" for line in said), *self._said_of_new()]

    def _said_of_new(self) -> list[str]:
        if not self._num_new:
            return []
        file = self._sides["item"].remarks[0].split(":")[0]
        done = "kept, to be recommended by their features" if self._new_items == KEEP else "left out"
        hint = "" if self._new_items == KEEP else " (`--new-items keep` keeps them)"
        return [f"items of {file} without an event: {self._num_new:,}, {done}{hint}"]

    def manifest(self, features: Sequence[str], words: Mapping[str, str]) -> dict[str, Any]:
        """What dataset.json says of the features.

        Args:
            features: columns of events that a data set without a schema has, too.
            words: digests of files of words.
        """
        known = renamed_columns(self.schema)
        usual = legacy_schema([name for name in features if name != "action"])
        whole = Schema({**usual.features, **known.features})
        more = {} if self._item_digest is None else {"item_features": self._item_digest}
        return {
            "version": 2,
            "schema": whole.words(),
            "statistics": self._statistics.result(),
            "table_ids": {
                each.table_name or each.name: self._kinds.get(each.name, "int64")
                for each in self.schema
                if each.raw_ids
            },
            "cross_hash": CROSS_HASH,
            "words": dict(words),
            **more,
        }

    def _of(self, owner: str) -> tuple[Feature, ...]:
        return self.users if owner == "user" else self._items

    def _take(self, owner: str, ids: IntArray) -> dict[str, Column]:
        columns, there = self._sides[owner].take(ids)
        if not there.all():
            self._note_lack(owner, ids[~there])
        return columns

    def _note_lack(self, owner: str, ids: npt.NDArray[np.int64]) -> None:
        count, some = self._lacked.get(owner, (0, []))
        self._lacked[owner] = (count + len(ids), some if len(some) >= 3 else [*some, ids[:3]])
