"""Files of items and users beside the events: their features, one row an id, found by that id.

They are held in memory while a data set is made: eight bytes a value, 1 GB for ten million items of a dozen features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from freescale.data.columns.ids import IdKinds
from freescale.data.columns.lists import Column, Lists, concat_columns
from freescale.data.columns.roles import ColumnNames
from freescale.data.columns.values import ValueReader
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.preparing.reading.raw_format import Reading
from freescale.data.preparing.reading.raw_input import check_input, find_format, read_events
from freescale.data.schema.feature import Feature
from freescale.data.schema.vocabulary import NONE
from freescale.data.source import IntArray
from freescale.data.words.id_words import IdWords
from freescale.errors import DataError
from freescale.jagged import find_sorted

# Formats whose lines are events whatever their fields are called.
_ONLY_EVENTS = ("movielens", "pairs", "sequences")
LIST_MARKS = {"inter": " "}
"""What stands between the values of a list in a format that has a mark of its own; others: | ; ,"""


@dataclass(frozen=True)
class SideFile:
    """A file of items or users.

    Args:
        owner: whose.
        path: the file, or a folder of such files.
        features: to take from it.
        header: names of its fields, where its first line does not have them.
        key: what the events call the column of their ids; tried first.
        time_unit: of times that are plain numbers.
        bad_lines: "stop" or "skip".
        keeps_all: rows that no event asks for may be kept, so the words of all its ids are.
    """

    owner: Literal["item", "user"]
    path: Path
    features: tuple[Feature, ...]
    header: tuple[str, ...] | None = None
    key: str | None = None
    time_unit: str = "auto"
    bad_lines: str = "stop"
    keeps_all: bool = False


class SideTable:
    """Features by id.

    Args:
        owner: of the features.
        features: in the order of the schema.
        ids: ascending.
        columns: one a feature, in the order of the ids.
        remarks: what was taken for what, for the user.
    """

    def __init__(
        self,
        owner: str,
        features: Sequence[Feature],
        ids: IntArray,
        columns: Mapping[str, Column],
        remarks: Sequence[str] = (),
    ) -> None:
        self.owner, self.features, self.ids = owner, tuple(features), ids
        self.columns, self.remarks = columns, tuple(remarks)

    def find(self, ids: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """[n] where each id stands, and whether it is there at all."""
        return find_sorted(self.ids, ids)

    def take(self, ids: IntArray) -> tuple[dict[str, Column], npt.NDArray[np.bool_]]:
        """The features of these ids, missing where the file lacks one; and which are there."""
        place, there = self.find(ids)
        columns = {each.name: _taken(each, self.columns[each.name], place, there) for each in self.features}
        return columns, there


def _taken(feature: Feature, column: Column, place: IntArray, there: npt.NDArray[np.bool_]) -> Column:
    if isinstance(column, Lists):
        lengths = np.zeros(len(place), dtype=np.int64)
        taken = column[place[there]]
        lengths[there] = taken.lengths
        return Lists.of(taken.values, lengths)
    out = np.full((len(place), *column.shape[1:]), missing_value(feature), dtype=column.dtype)
    out[there] = column[place[there]]
    return out


def missing_value(feature: Feature) -> float | int:
    """What stands in a column where a feature has no value; lists are empty."""
    if feature.kind in ("number", "vector"):
        return float("nan")
    return NONE if feature.kind == "id" else 0


def read_side(side: SideFile, *, kinds: IdKinds, words: IdWords, memory: int) -> SideTable:
    """All rows of such a file.

    Args:
        side: the file.
        kinds: of the ids of its owner and of its features, by name.
        words: keeps the words of features.
        memory: bytes for all of `prepare`.

    Raises:
        OtherIdsError: ids are of another kind.
    """
    check_input(side.path, side.owner)
    kind, _ = find_format(side.path, None, side.header, owner=side.owner)
    if kind in _ONLY_EVENTS:
        raise DataError(
            f"{side.path} does not say what its fields are",
            got=f"it looks like {kind}",
            allowed="csv, jsonl, inter or parquet",
            next_step=f"name the fields in their order: `--{side.owner}-columns {side.owner},...` (`_` ignores one)",
        )
    values = ValueReader(
        time_unit=side.time_unit,
        bad_lines=side.bad_lines,
        id_kinds=kinds,
        features=side.features,
        marks=LIST_MARKS.get(kind, "|;,"),
    )
    reading = Reading(
        columns=ColumnNames(**{side.owner: side.key}),
        header=side.header,
        memory=memory,
        values=values,
        roles=(side.owner,),
    )
    key = None if side.keeps_all else side.owner
    parts = [words.take(events, key=key) for events, _ in read_events(side.path, kind, reading)]
    names = (side.owner, *(each.name for each in side.features))
    columns = {name: concat_columns([part[name] for part in parts]) for name in names}
    return _by_id(side, columns, values)


def _by_id(side: SideFile, columns: Events, values: ValueReader) -> SideTable:
    ids: IntArray = columns.pop(side.owner)
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    first = np.concatenate([np.ones(min(1, len(ids)), dtype=bool), ids[1:] != ids[:-1]])
    remarks = [f"{side.path.name}: {len(ids):,} {side.owner}s", *(f"  {line}" for line in values.describe())]
    num_again = int((~first).sum())
    if num_again and not values.bad_lines.skips:
        row = int(order[np.flatnonzero(~first)[0]])
        raise DataError(
            f"{side.path} has the same {side.owner} twice",
            got=f"{num_again:,} times, first in row {row + 1}",
            allowed=f"one row for each {side.owner}",
            next_step="leave rows out, or keep the first of each (`--bad-lines skip`)",
        )
    if num_again:
        remarks.append(f"  {num_again:,} rows of a {side.owner} that was there already left out")
        ids, order = ids[first], order[first]
    return SideTable(
        side.owner, side.features, ids, {name: column[order] for name, column in columns.items()}, remarks
    )
