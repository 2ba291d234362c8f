"""Tables in an export: rows of ids that events and users of a request may have, and how an id finds its row.

how              rows in the file                       an id that has none
ids              one an id, ascending                   is unknown: the model's learnt "none" stands for it
hash             all, by number                         there is none such
zero_collision   one an id, ascending, then shared ones shares one, as in training
kind             all, by number                         is for the map to say: a formula from outside the package
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale import registry
from freescale.data import IntArray
from freescale.embedding import (
    SGD,
    DirectMap,
    EmbeddingTable,
    HashMap,
    IdMap,
    IdMapKind,
    NumberedMap,
    ShardedEmbedding,
    ShardedIdMap,
    SpreadMap,
    TableSpec,
    as_compute,
    learns_ids,
)
from freescale.errors import DataError
from freescale.exports.files.parquet_parts import write_parts
from freescale.kernels.id_table import SlotLayout
from freescale.kernels.rows import find_sorted

_CHUNK_ROWS = 65_536


@dataclass(frozen=True)
class KeptRows:
    """The rows of a table that are exported.

    Args:
        rows: their numbers in the table.
        ids: whose rows the first of them are, ascending; None where a formula says.
        facts: how an id finds its row.
    """

    rows: Tensor
    ids: Tensor | None
    facts: Mapping[str, Any]


def kept_rows(name: str, id_map: IdMap, *, kind: Mapping[str, Any] | None = None) -> KeptRows:
    """What must be kept of a table, in a process that holds all of it.

    `kind` makes the map again: its name under "kind" and its "options".
    """
    if isinstance(id_map, SpreadMap):
        there = kept_rows(name, id_map.inner, kind=kind)
        return replace(there, rows=id_map.placed(there.rows))
    if isinstance(id_map, HashMap):
        return KeptRows(torch.arange(id_map.num_rows), None, {"how": "hash"})
    if isinstance(id_map, DirectMap | NumberedMap):
        ids = id_map.ids if isinstance(id_map, NumberedMap) else torch.arange(id_map.num_rows)
        return KeptRows(id_map.rows(ids), ids, {"how": "ids"})
    if not learns_ids(id_map):
        if kind is not None and not id_map.state_dict():
            return KeptRows(torch.arange(id_map.num_rows), None, {"how": "kind", **kind})
        raise DataError(
            f"the id map of table {name} cannot be exported",
            got=type(id_map).__name__,
            allowed="direct, hash, zero_collision, a formula without a state, or a map that has residents()",
            next_step=f"train with tables.{name}.map set to one of them",
        )
    ids, rows = (each.cpu() for each in id_map.residents())
    shared = shared_rows(id_map)
    if shared is None:
        return KeptRows(rows, ids, {"how": "ids"})
    return KeptRows(torch.cat([rows, shared.rows]), ids, shared.facts)


def shared_rows(id_map: IdMap) -> KeptRows | None:
    """The rows of a table that ids without a row of their own share; None where the map has none such."""
    if not isinstance(id_map, ShardedIdMap):
        return None
    layout = id_map.map.layout
    facts = {each: getattr(layout, each) for each in ("num_buckets", "bucket_rows", "bucket_slots")}
    bucket = torch.arange(layout.num_buckets)[:, None] * layout.bucket_rows
    rows = (bucket + torch.arange(layout.bucket_slots, layout.bucket_rows)).flatten()
    return KeptRows(rows, torch.empty(0, dtype=torch.int64), {"how": "zero_collision", **facts})


def write_table(path: Path, table: EmbeddingTable, kept: KeptRows, words: Any) -> None:
    """One row a vector, behind its id and its word where it has them."""
    import pyarrow as pa

    num_ids = 0 if kept.ids is None else len(kept.ids)

    def parts() -> Iterator[Any]:
        for start in range(0, max(1, len(kept.rows)), _CHUNK_ROWS):
            rows = kept.rows[start : start + _CHUNK_ROWS]
            columns: dict[str, Any] = {}
            if kept.ids is not None:
                own = kept.ids[start : start + _CHUNK_ROWS].numpy()
                shared = len(rows) - len(own)
                columns["id"] = pa.concat_arrays([pa.array(own), pa.nulls(shared, pa.int64())])
                if words is not None:
                    some = words.slice(min(start, num_ids), len(own)).cast(pa.large_string())
                    columns["word"] = pa.concat_arrays([some, pa.nulls(shared, pa.large_string())])
            vectors = as_compute(table.gather(rows.to(table.weight.device))).float().cpu().numpy()
            flat = pa.array(vectors.ravel())
            columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, table.dim)
            yield pa.table(columns)

    write_parts(path, parts())


class ServedTable:
    """Rows of a table in a service; an `IdMap`, of ids that it knows.

    Args:
        vectors: [n, dim] the rows that were kept.
        ids: whose rows the first of them are, ascending; None where a formula says.
        facts: how an id finds its row.
    """

    learns = False

    def __init__(self, vectors: Tensor, ids: Tensor | None, facts: Mapping[str, Any]) -> None:
        self.vectors, self.num_rows = vectors, len(vectors)
        self._ids = ids
        self._formula: IdMap | None = None
        if facts["how"] == "hash":
            self._formula = HashMap(len(vectors))
        elif facts["how"] == "kind":
            self._formula = _foreign_map(facts, num_rows=len(vectors))
        self._layout = None
        if facts["how"] == "zero_collision":
            buckets, rows, slots = (facts[each] for each in ("num_buckets", "bucket_rows", "bucket_slots"))
            self._layout = SlotLayout(buckets, rows, slots, slots, 0, buckets)

    @classmethod
    def read(cls, path: Path, facts: Mapping[str, Any], dtype: torch.dtype) -> ServedTable:
        """What `write_table` has written."""
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        flat = table.column("vector").combine_chunks().flatten().to_numpy(zero_copy_only=False)
        width = table.schema.field("vector").type.list_size
        vectors = torch.from_numpy(flat.reshape(-1, width).copy()).to(dtype)
        ids = None
        if "id" in table.column_names:
            own = table.column("id").drop_null().to_numpy()
            ids = torch.from_numpy(np.array(own, dtype=np.int64))
        return cls(vectors, ids, facts)

    def knows(self, ids: Tensor) -> Tensor:
        """Which ids have a row, of their own or shared."""
        if self._formula is not None or self._layout is not None:
            return torch.ones_like(ids, dtype=torch.bool)
        assert self._ids is not None
        return find_sorted(self._ids, ids)[1]

    def rows(self, ids: Tensor, *, step: int | None = None) -> Tensor:
        """Where the vector of every id stands; the service changes nothing."""
        if self._formula is not None:
            return self._formula.rows(ids)
        assert self._ids is not None
        place, known = find_sorted(self._ids, ids)
        if self._layout is None:
            return place
        row = self._layout.overflow(ids)
        bucket, within = row // self._layout.bucket_rows, row % self._layout.bucket_rows
        shared = bucket * self._layout.overflow_rows + within - self._layout.bucket_slots
        return torch.where(known, place, len(self._ids) + shared)

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing is learnt here."""
        return {}

    def restored(self) -> None:
        """Nothing to bring in line."""


class SharedRows:
    """Rows of a table of items for those that have none of their own.

    Args:
        table: the rows; it has none of an id's own.
        ids: who may have one, ascending; None: any id.
    """

    def __init__(self, table: ServedTable, ids: Tensor | None) -> None:
        self.table, self._ids = table, None if ids is None else ids.numpy()

    def find(self, ids: IntArray) -> tuple[npt.NDArray[np.bool_], Tensor]:
        """[n] which of these ids share a row, and where those of all of them would stand."""
        may = np.ones(len(ids), dtype=bool) if self._ids is None else np.isin(ids, self._ids)
        return may, self.table.rows(torch.from_numpy(ids))


def _foreign_map(facts: Mapping[str, Any], *, num_rows: int) -> IdMap:
    """A formula from outside the package, made as for a run; whoever opens the export has imported its module."""
    kind = registry.find("id_map", facts["kind"])
    # What it may ask of a table is how many rows there are; the vectors stand elsewhere.
    spec = TableSpec(name="served", num_rows=num_rows, dim=1, optimizer=SGD())
    maker: IdMapKind = kind.make
    return maker.build(
        embedding=ShardedEmbedding([spec], group=None),
        table="served",
        channel=None,
        options=registry.options_of(kind, facts["options"]),
    )
