"""Parquet that is grouped by user already is only indexed: lengths, items, and a manifest that points at the files.

What it must be for that: a row a user, every user once; lists of whole numbers, none missing; times in seconds that
never fall within a list; row groups that fit into a reader's memory. Where it is not, it says why, and `prepare` writes
the histories anew.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.columns.dates import num_date_digits
from freescale.data.columns.roles import ColumnNames, choose_columns
from freescale.data.columns.split_text import is_listed
from freescale.data.preparing.writing.dataset_writer import write_catalogue
from freescale.data.preparing.writing.item_counts import ItemCounts
from freescale.data.source import IntArray
from freescale.data.stored.digest import add_arrays, digest_arrays, digest_footer
from freescale.data.stored.manifest import FEATURE_DTYPES, LENGTHS_FILE, TIME_UNIT, save_manifest
from freescale.data.stored.storage import parent_address
from freescale.errors import DataError

# Half of what a reader keeps by default: larger row groups would be decoded again for every batch.
_MOST_GROUP_BYTES = 128 << 20
# Seconds up to the year 5138; larger numbers count milliseconds or less.
_MOST_SECONDS = 10**11
_SAMPLE_ROWS = 20


class _UnfitError(Exception):
    """Why files cannot be read as they are."""


@dataclass(frozen=True)
class _Part:
    """One row group."""

    users: IntArray
    lengths: IntArray
    columns: dict[str, Any]


@dataclass(frozen=True)
class Index:
    """What became of an input that might be grouped by user.

    Args:
        manifest: of the index, or None where the histories must be written anew.
        remarks: what was decided and why, for the user.
    """

    manifest: dict[str, Any] | None
    remarks: tuple[str, ...] = ()


def index_input(
    source: Path,
    out: Path,
    *,
    root: str | None,
    columns: ColumnNames,
    min_events: int,
    name: str,
    wanted: bool,
) -> Index:
    """Index Parquet files that are grouped by user into an empty folder, if they can be read as they are.

    Args:
        source: the input, a file or a folder.
        out: the folder.
        root: where the files will be found, if that is not where they are now.
        columns: names, where they are not the usual ones.
        min_events: histories with fewer events count as empty.
        name: of the data set.
        wanted: whether to look at all.
    """
    files = _parquet_files(source) if wanted else []
    if not files or not _has_lists(files[0], columns):
        return Index(None)  # what else is wrong with it is told by whoever reads it event by event
    base = source if source.is_dir() else source.parent
    if root is None:
        root = str(base.resolve())
    elif source.is_file():
        root = parent_address(root)
    try:
        manifest = _index(files, out, root, base, columns, min_events, name)
    except _UnfitError as why:
        return Index(None, (f"histories are written anew: {why}",))
    return Index(manifest)


def _parquet_files(source: Path) -> list[Path]:
    """By name; hidden files and folders are none of the data."""
    if source.is_file():
        return [source]
    found = (path for suffix in ("parquet", "pq") for path in source.rglob(f"*.{suffix}") if path.is_file())
    return sorted(
        path for path in found if not any(part[0] in "._" for part in path.relative_to(source).parts)
    )


def _has_lists(file: Path, columns: ColumnNames) -> bool:
    """Whether the items of a Parquet file stand in lists; what cannot be read is for others to tell of."""
    try:
        item = pq.read_schema(file).field(_choose(file, columns)["item"]).type
    except (OSError, pa.ArrowException, DataError):
        return False
    return is_listed(item)


def _index(
    files: list[Path], out: Path, root: str, base: Path, columns: ColumnNames, min_events: int, name: str
) -> dict[str, Any]:
    chosen = _columns_of(files, columns)
    features = [feature for feature in FEATURE_DTYPES if feature in chosen]
    items, shards = ItemCounts(out), []
    users: list[IntArray] = []
    lengths: list[IntArray] = []
    for file in files:
        digest, groups = hashlib.blake2b(digest_size=8), []
        with pq.ParquetFile(file, pre_buffer=False) as parquet:
            for number in range(parquet.metadata.num_row_groups):
                part = _row_group(parquet, number, file, chosen, features)
                add_arrays(digest, part.users, part.lengths, *(part.columns[feature] for feature in features))
                kept = part.lengths >= min_events
                users.append(part.users)
                lengths.append(np.where(kept, part.lengths, 0))
                events = part.columns["item"][np.repeat(kept, part.lengths)]
                if len(events):
                    items.add(events, part.lengths[kept])
                groups.append(len(part.users))
        shards.append(
            {
                "file": str(file.relative_to(base)),
                "bytes": file.stat().st_size,
                "row_groups": groups,
                "digest": digest.hexdigest(),
                "footer": digest_footer(file),
            }
        )
    every, counts = np.concatenate(users), np.concatenate(lengths)
    _check_once(every)
    if not counts.any():
        raise _UnfitError(f"no user has {min_events} events or more")
    ids, total, train = items.merged()
    np.save(out / LENGTHS_FILE, counts, allow_pickle=False)
    write_catalogue(out, ids, total, train)
    manifest = {
        "name": name,
        "source_format": "parquet",
        "num_users": len(counts),
        "num_events": int(counts.sum()),
        "num_items": len(ids),
        "max_item": int(ids[-1]),
        "features": features,
        "ids": {"user": "int64", "item": "int64"},
        "dropped_users": int((counts == 0).sum()),
        "min_events": min_events,
        "catalogue": digest_arrays(ids, total, train),
        "taken": _taken(chosen, files[0], root),
        "root": root,
        "columns": chosen,
        "shards": shards,
    }
    if "time" in features:
        manifest["time_unit"] = TIME_UNIT
    save_manifest(out, manifest)
    return manifest


def _taken(chosen: dict[str, str], file: Path, root: str) -> list[str]:
    """What was taken for what, what was ignored, and where the histories are: a line each."""
    said = [f"{role}: {column}" + (" (seconds)" if role == "time" else "") for role, column in chosen.items()]
    if "time" not in chosen:
        said.append("time: none, events keep the order of the input")
    ignored = [name for name in pq.read_schema(file).names if name not in chosen.values()]
    if ignored:
        said.append("ignored: " + ", ".join(ignored))
    return [*said, f"histories stay in {root}: one user a row and in order, so they are only indexed"]


def _columns_of(files: list[Path], columns: ColumnNames) -> dict[str, str]:
    """Role -> name of its column, the same in all files, of types that fit."""
    chosen: dict[str, str] = {}
    for file in files:
        schema, here = pq.read_schema(file), _choose(file, columns)
        if chosen and here != chosen:
            raise _UnfitError(f"{file.name} has other columns than {files[0].name}")
        chosen = here
        for role, column in here.items():
            _check_type(file, role, schema.field(column).type)
    return chosen


def _choose(file: Path, columns: ColumnNames) -> dict[str, str]:
    """Role -> name of its column; the first values of others may show that they are times."""
    with pq.ParquetFile(file, pre_buffer=False) as parquet:
        names = parquet.schema_arrow.names

        def sample(column: int) -> list[Any]:
            batches = parquet.iter_batches(_SAMPLE_ROWS, columns=[names[column]], use_threads=False)
            return next((batch.column(0).to_pylist() for batch in batches), [])

        return {role: names[at] for role, at in choose_columns(file, names, columns, sample).items()}


def _check_type(file: Path, role: str, kind: Any) -> None:
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if role != "user" and not listed:
        raise _UnfitError(f"the {role}s in {file.name} are {kind}, not lists")
    value = kind.value_type if listed else kind
    whole = pa.types.is_integer(value) and value != pa.uint64()
    if role == "user" and listed:
        raise _UnfitError(f"the users in {file.name} are lists")
    if not (whole or (role == "action" and pa.types.is_floating(value))):
        raise _UnfitError(
            f"the {role}s in {file.name} are {value}, not whole numbers of at most 64 bits, signed"
        )


def _row_group(parquet: Any, number: int, file: Path, chosen: dict[str, str], features: list[str]) -> _Part:
    where = f"row group {number} of {file.name}"
    group = parquet.metadata.row_group(number)
    leaves = [group.column(n) for n in range(group.num_columns)]
    size = sum(leaf.num_values * 8 for leaf in leaves if leaf.path_in_schema.split(".")[0] in chosen.values())
    if size > _MOST_GROUP_BYTES:
        raise _UnfitError(f"{where} takes {size >> 20} MiB of memory, more than {_MOST_GROUP_BYTES >> 20}")
    table = parquet.read_row_group(number, columns=list(chosen.values()), use_threads=False)
    lists = {feature: table[chosen[feature]].combine_chunks() for feature in features}
    if table[chosen["user"]].null_count or any(c.null_count or c.values.null_count for c in lists.values()):
        raise _UnfitError(f"{where} has missing values")
    offsets = lists["item"].offsets.to_numpy().astype(np.int64)
    if any(not np.array_equal(column.offsets.to_numpy(), offsets) for column in lists.values()):
        raise _UnfitError(f"{where} has lists of different lengths for one user")
    columns = {
        feature: column.values.to_numpy().astype(FEATURE_DTYPES[feature], copy=False)
        for feature, column in lists.items()
    }
    _check_values(where, columns, offsets)
    return _Part(table[chosen["user"]].to_numpy().astype(np.int64, copy=False), np.diff(offsets), columns)


def _check_values(where: str, columns: dict[str, Any], offsets: IntArray) -> None:
    if "action" in columns and not np.isfinite(columns["action"]).all():
        raise _UnfitError(f"{where} has actions that are no finite numbers")
    times = columns.get("time")
    if times is None or not len(times):
        return
    if int(np.abs(times).max()) > _MOST_SECONDS:
        raise _UnfitError(f"{where} has times that are not in seconds")
    if num_date_digits(times) is not None:
        raise _UnfitError(f"{where} has dates written as digits, such as {int(times[0])}, not seconds")
    falls = times[1:] < times[:-1]
    starts = offsets[1:-1]
    falls[starts[(starts > 0) & (starts < len(times))] - 1] = False
    if falls.any():
        raise _UnfitError(f"{where} has a history that is not in the order of time")


def _check_once(users: IntArray) -> None:
    ascending = np.sort(users)
    twice = ascending[1:][ascending[1:] == ascending[:-1]]
    if len(twice):
        raise _UnfitError(f"user {int(twice[0])} stands in more than one row")
