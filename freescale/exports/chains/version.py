"""A version of a model as it is served: weights, items, vectors; the difference of two, and one from the other by it.

A version with its fingerprint is the same wherever it comes from: from a full export, or from an older version and
deltas. Bits are compared, so that equal means equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.data import IntArray, read_tensors, write_tensors
from freescale.errors import DataError
from freescale.exports.chains.table_rows import (
    TableDelta,
    TableRows,
    merged,
    read_table,
    table_applied,
    table_difference,
    unchanged,
    write_table,
)
from freescale.exports.files.file_sums import FILES, check_files, sums_of
from freescale.exports.served.served_features import ITEM_COLUMN, table_file
from freescale.jagged import find_sorted

_BLOCK = 1 << 24
SHARED_TABLE = "item"
"""The table of items, in the name of the file with rows that items without one share."""
SHARING = "items_that_share_rows"
"""Among the weights: the ids of these items, ascending; not there where any item may share one."""


@dataclass(frozen=True, eq=False)
class Version:
    """What a service needs of a model.

    Args:
        manifest: what an export says of itself, without its fingerprint.
        dense: weights of the dense part.
        ids: [n] items, ascending.
        vectors: [n, dim] float32, theirs.
        words: [n] Arrow array of the users' own ids, where these are text.
        tables: rows that features of events and users have, by table.
    """

    manifest: Mapping[str, Any]
    dense: Mapping[str, Tensor]
    ids: IntArray
    vectors: npt.NDArray[np.float32]
    words: Any = None
    tables: Mapping[str, TableRows] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """Of everything in it: names, types, shapes, ids and bytes."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps(dict(self.manifest), sort_keys=True).encode())
        for name in sorted(self.dense):
            value = self.dense[name].detach().cpu().contiguous()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
        _add_arrays(digest, self.ids, self.vectors)
        for name in sorted(self.tables):
            table = self.tables[name]
            digest.update(f"table {name}".encode())
            _add_arrays(digest, *(() if table.ids is None else (table.ids,)), table.vectors)
        for word in self.words.to_pylist() if self.words is not None else ():
            digest.update(f"{len(word)} {word}".encode())
        return digest.hexdigest()


def _add_arrays(digest: Any, *arrays: npt.NDArray[Any]) -> None:
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(flat), _BLOCK):
            digest.update(flat[start : start + _BLOCK].data)


@dataclass(frozen=True, eq=False)
class Delta:
    """What makes one version from the one before it.

    Args:
        manifest: of the new version.
        dense: of the new version, all of it: every step changes every weight.
        ids: [n] items that are new or have another vector, ascending.
        vectors: [n, dim] theirs.
        deleted: [m] items that are gone, ascending.
        words: [n] of `ids`, where they are text.
        tables: of the other tables, what makes their rows.
    """

    manifest: Mapping[str, Any]
    dense: Mapping[str, Tensor]
    ids: IntArray
    vectors: npt.NDArray[np.float32]
    deleted: IntArray
    words: Any = None
    tables: Mapping[str, TableDelta] = field(default_factory=dict)


def read_version(folder: Path) -> Version:
    """The version that an export holds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    manifest = json.loads((folder / "manifest.json").read_text())
    check_files(folder, manifest)
    for of_the_files in ("fingerprint", FILES):
        manifest.pop(of_the_files, None)
    table = pq.read_table(folder / "items.parquet")
    crossed = [name for name in table.column_names if name.startswith(ITEM_COLUMN)]
    if crossed:
        raise DataError(
            "models with crosses of features of items cannot be published as deltas yet",
            got=", ".join(name.removeprefix(ITEM_COLUMN) for name in crossed),
            next_step="`freescale export RUN_DIR OUT_DIR` writes the whole of it",
        )
    tables = {name: read_table(folder / table_file(name)) for name in _tables_of(manifest)}
    flat = table.column("vector").combine_chunks().flatten().to_numpy(zero_copy_only=False)
    ids: IntArray = table.column("item").to_numpy().astype(np.int64)
    words = None
    if "word" in table.column_names:
        words = table.column("word").cast(pa.large_string()).combine_chunks()
        words = pa.concat_arrays(words.chunks) if isinstance(words, pa.ChunkedArray) else words
    width = table.schema.field("vector").type.list_size
    vectors = np.array(flat, dtype=np.float32).reshape(len(ids), width)
    if (ids[1:] <= ids[:-1]).any():
        order = np.argsort(ids, kind="stable")
        ids, vectors = ids[order], vectors[order]
        words = None if words is None else words.take(pa.array(order))
    return Version(manifest, read_tensors(folder / "model.safetensors"), ids, vectors, words, tables)


def _tables_of(manifest: Mapping[str, Any]) -> Sequence[str]:
    shared = [SHARED_TABLE] if "shared" in manifest else []
    return shared + (list(manifest["features"]["tables"]) if "features" in manifest else [])


def write_version(folder: Path, version: Version) -> None:
    """An export that holds this version, in an empty folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_tensors(folder / "model.safetensors", version.dense)
    flat = pa.array(version.vectors.ravel())
    columns = {
        "item": version.ids,
        "vector": pa.FixedSizeListArray.from_arrays(flat, version.vectors.shape[1]),
    }
    if version.words is not None:
        columns["word"] = version.words
    pq.write_table(pa.table(columns), folder / "items.parquet")
    for name, rows in version.tables.items():
        write_table(folder / table_file(name), rows)
    manifest = {**version.manifest, "fingerprint": version.fingerprint, FILES: sums_of(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def difference(old: Version, new: Version) -> Delta:
    """What makes `new` from `old`; ids that came and went in between are not mentioned.

    Raises:
        DataError: it has other tables.
    """
    import pyarrow as pa

    if sorted(old.tables) != sorted(new.tables):
        raise DataError(
            "the versions before have other tables",
            got=", ".join(new.tables) or "none",
            allowed=", ".join(old.tables) or "none",
            next_step="publish into a new folder",
        )
    same = unchanged(old.ids, old.vectors, new.ids, new.vectors)
    if new.words is not None and old.words is not None and same.any():
        index, place = np.flatnonzero(same), find_sorted(old.ids, new.ids)[0]
        alike = pa.compute.equal(new.words.take(pa.array(index)), old.words.take(pa.array(place[index])))
        same[index] = alike.to_numpy(zero_copy_only=False)
    changed = np.flatnonzero(~same)
    return Delta(
        manifest=new.manifest,
        dense=new.dense,
        ids=new.ids[changed],
        vectors=new.vectors[changed],
        deleted=old.ids[~find_sorted(new.ids, old.ids)[1]],
        words=None if new.words is None else new.words.take(pa.array(changed)),
        tables={name: table_difference(old.tables[name], rows) for name, rows in new.tables.items()},
    )


def applied(old: Version, delta: Delta) -> Version:
    """The version that a delta makes from the one before it; that one stays as it is.

    Raises:
        DataError: it takes away what is not there.
    """
    import pyarrow as pa

    ids, vectors, keep, order = merged(old.ids, old.vectors, delta.ids, delta.vectors, delta.deleted)
    words = None
    if delta.words is not None:
        kept = old.words.filter(pa.array(keep))
        words = pa.concat_arrays([kept, delta.words.cast(kept.type)]).take(pa.array(order))
    if sorted(old.tables) != sorted(delta.tables):
        raise DataError(
            "the delta has other tables", got=", ".join(delta.tables), allowed=", ".join(old.tables)
        )
    tables = {name: table_applied(old.tables[name], each) for name, each in delta.tables.items()}
    return Version(delta.manifest, delta.dense, ids, vectors, words, tables)
