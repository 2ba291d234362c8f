"""The small files of a data set, read and checked: lengths, the catalogue of items and their features, the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.columns.lists import Lists, from_arrow, plain_arrays
from freescale.data.features.feature_source import ItemFeatures
from freescale.data.features.feature_statistics import Statistics
from freescale.data.schema.feature import Schema, legacy_schema
from freescale.data.schema.reading import read_schema
from freescale.data.source import IntArray, ItemCatalog
from freescale.data.stored.digest import digest_arrays
from freescale.data.stored.manifest import DATASET_FILE, ITEMS_FILE, LENGTHS_FILE, damaged


def load_schema_of(folder: Path, manifest: dict[str, Any]) -> tuple[Schema, Statistics]:
    """What the manifest says of features; before there were schemas: items, times, and numbers of actions."""
    if "schema" not in manifest:
        return legacy_schema(manifest["features"]), {}
    problems: list[str] = []
    schema, statistics = read_schema(manifest["schema"], problems), manifest.get("statistics", {})
    for each in schema:
        if each.kind == "ids" and not isinstance(statistics.get(each.name, {}).get("longest"), int):
            problems.append(f"'statistics' do not tell the longest list of {each.name}")
    if problems:
        raise damaged(folder / DATASET_FILE, f"'schema': {problems[0]}")
    return schema, statistics


def load_lengths(folder: Path, num_rows: int) -> IntArray:
    """Events of each history, mapped from disk."""
    path = folder / LENGTHS_FILE
    try:
        lengths = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise damaged(path, str(error)) from error
    if lengths.shape != (num_rows,) or lengths.dtype != np.int64:
        raise damaged(path, f"{lengths.dtype} of shape {lengths.shape} for {num_rows} users")
    return lengths


def check_sum(folder: Path, lengths: IntArray, num_events: object) -> None:
    """No single length can be damaged and the sum be right; read without this, one could ask for any memory."""
    if num_events is None or not len(lengths):
        return
    total = int(lengths.sum())
    if total != num_events or int(lengths.min()) < 0:
        raise damaged(
            folder / LENGTHS_FILE, f"it adds up to {total:,} events, {DATASET_FILE} says {num_events:,}"
        )


def load_items(folder: Path, digest: str | None) -> ItemCatalog:
    """The items that occur, compared with what the manifest says of them."""
    table = _read_items(folder, ["item", "count", "train_count"])
    columns = [table[name].to_numpy() for name in table.column_names]
    if digest not in (None, digest_arrays(*columns)):
        raise damaged(folder / ITEMS_FILE, f"it is not the catalogue that {DATASET_FILE} tells of")
    return ItemCatalog(*columns)


def load_item_features(
    folder: Path, schema: Schema, statistics: Statistics, digest: str | None
) -> ItemFeatures:
    """What is known of the items, compared with what the manifest says of it."""
    names = [each.name for each in schema.stored("item")]
    table = _read_items(folder, names)
    try:
        columns = {name: from_arrow(table[name]) for name in names}
    except (AttributeError, pa.ArrowException) as error:
        raise damaged(folder / ITEMS_FILE, str(error)) from error
    arrays = [array for column in columns.values() for array in plain_arrays(column)]
    if digest not in (None, digest_arrays(*arrays)):
        raise damaged(
            folder / ITEMS_FILE, f"it does not hold the features of items that {DATASET_FILE} tells of"
        )
    longest = {
        name: int(statistics[name]["longest"])
        for name, column in columns.items()
        if isinstance(column, Lists)
    }
    return ItemFeatures(columns, longest)


def _read_items(folder: Path, names: list[str]) -> Any:
    path = folder / ITEMS_FILE
    try:
        table = pq.read_table(path, columns=names, use_threads=False, partitioning=None)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise damaged(path, str(error)) from error
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise damaged(path, f"it has no column {missing[0]!r}")
    return table.select(names)
