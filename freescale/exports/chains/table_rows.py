"""Rows of a table in a version: those of ids, and behind them those that ids share or that a formula finds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from freescale.data import IntArray
from freescale.errors import DataError
from freescale.jagged import find_sorted

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class TableRows:
    """The rows of one table.

    Args:
        ids: [n] whose rows the first are, ascending; None where a formula finds all rows.
        vectors: [n + m, dim] rows of ids, then rows by number.
    """

    ids: IntArray | None
    vectors: Vectors

    @property
    def num_own(self) -> int:
        """Rows that are some id's own."""
        return 0 if self.ids is None else len(self.ids)


@dataclass(frozen=True, eq=False)
class TableDelta:
    """What makes the rows of one version from those of the one before it.

    Args:
        ids: [n] that are new or have another row, ascending; None where a formula finds all rows.
        vectors: [n, dim] theirs.
        deleted: [m] ids that are gone, ascending.
        numbers: [k] which of the rows by number are others, ascending.
        others: [k, dim] these rows.
    """

    ids: IntArray | None
    vectors: Vectors
    deleted: IntArray
    numbers: IntArray
    others: Vectors


def unchanged(old_ids: IntArray, old: Vectors, new_ids: IntArray, new: Vectors) -> npt.NDArray[np.bool_]:
    """[new ids] which of them had the same row before, bit for bit."""
    place, known = find_sorted(old_ids, new_ids)
    if old.shape[1:] != new.shape[1:]:
        return np.zeros(len(new_ids), bool)
    known[known] = _same(new[known], old[place[known]])
    return known


def merged(
    old_ids: IntArray, old: Vectors, ids: IntArray, vectors: Vectors, deleted: IntArray
) -> tuple[IntArray, Vectors, npt.NDArray[np.bool_], IntArray]:
    """Rows after a change: their ids, the rows, which of the old ones were kept, and the order of kept and new ones.

    Raises:
        DataError: it takes away what is not there.
    """
    place, gone = find_sorted(old_ids, deleted)
    if not gone.all():
        raise DataError(
            "the delta deletes an item that the version before does not have", got=int(deleted[~gone][0])
        )
    keep = np.ones(len(old_ids), bool)
    keep[place] = False
    place, replaced = find_sorted(old_ids, ids)
    keep[place[replaced]] = False
    every = np.concatenate([old_ids[keep], ids])
    order = np.argsort(every, kind="stable")
    made = np.empty((len(every), vectors.shape[1]), np.float32)
    num_kept = int(keep.sum())
    rank = np.empty(len(every), np.int64)
    rank[order] = np.arange(len(every))
    if num_kept:
        made[rank[:num_kept]] = old[keep]
    made[rank[num_kept:]] = vectors
    return every[order], made, keep, order


def table_difference(old: TableRows, new: TableRows) -> TableDelta:
    """What makes the new rows from the old ones; a table keeps its kind and the number of rows that have no id."""
    none = np.zeros(0, np.int64)
    old_rest, new_rest = old.vectors[old.num_own :], new.vectors[new.num_own :]
    numbers = np.arange(len(new_rest))
    if old_rest.shape == new_rest.shape:
        numbers = np.flatnonzero(~_same(new_rest, old_rest))
    if new.ids is None or old.ids is None:
        return TableDelta(new.ids, new.vectors[: new.num_own], none, numbers, new_rest[numbers])
    rows = new.vectors[: new.num_own]
    changed = np.flatnonzero(~unchanged(old.ids, old.vectors[: old.num_own], new.ids, rows))
    deleted = old.ids[~find_sorted(new.ids, old.ids)[1]]
    return TableDelta(new.ids[changed], rows[changed], deleted, numbers, new_rest[numbers])


def table_applied(old: TableRows, delta: TableDelta) -> TableRows:
    """The rows that a delta makes from the old ones; those stay as they are."""
    rest = old.vectors[old.num_own :].copy()
    if len(delta.numbers) and int(delta.numbers[-1]) >= len(rest):
        raise DataError("the delta changes a row that there is not", got=int(delta.numbers[-1]))
    rest[delta.numbers] = delta.others
    if delta.ids is None or old.ids is None:
        return TableRows(old.ids, np.concatenate([old.vectors[: old.num_own], rest]))
    ids, rows, _, _ = merged(old.ids, old.vectors[: old.num_own], delta.ids, delta.vectors, delta.deleted)
    return TableRows(ids, np.concatenate([rows, rest]))


def read_table(path: Path) -> TableRows:
    """The rows that an export holds."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    flat = table.column("vector").combine_chunks().flatten().to_numpy(zero_copy_only=False)
    width = table.schema.field("vector").type.list_size
    vectors = np.array(flat, dtype=np.float32).reshape(-1, width)
    if "id" not in table.column_names:
        return TableRows(None, vectors)
    return TableRows(np.array(table.column("id").drop_null().to_numpy(), dtype=np.int64), vectors)


def write_table(path: Path, rows: TableRows) -> None:
    """As an export has it, without the words of ids, which no service reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {}
    if rows.ids is not None:
        shared = len(rows.vectors) - rows.num_own
        columns["id"] = pa.concat_arrays([pa.array(rows.ids), pa.nulls(shared, pa.int64())])
    flat = pa.array(np.ascontiguousarray(rows.vectors).ravel())
    columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, rows.vectors.shape[1])
    pq.write_table(pa.table(columns), path)


def _same(one: Vectors, other: Vectors) -> npt.NDArray[np.bool_]:
    """[n] which rows have the same bits."""
    mine, theirs = (np.ascontiguousarray(each).view(np.uint32) for each in (one, other))
    alike: npt.NDArray[np.bool_] = np.all(mine == theirs, axis=1)
    return alike
