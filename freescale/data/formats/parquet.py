"""Reads interactions from Parquet: one event a row, or one user a row with lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from freescale.data.columns.ids import IdKinds
from freescale.data.columns.roles import choose_columns
from freescale.data.columns.values import checked_events
from freescale.data.event_columns import Events
from freescale.data.excerpt import excerpt
from freescale.data.raw_format import RawSample, Reading
from freescale.data.source import IntArray
from freescale.errors import DataError
from freescale.registry import register


@register("format", "parquet")
class ParquetFormat:
    """One event a row, or one user a row with lists; columns by name."""

    suffixes = (".parquet", ".pq")
    in_folders = True

    def recognises(self, sample: RawSample, /) -> str | None:
        """By the four bytes every Parquet file starts with."""
        return "it starts like a Parquet file" if sample.head.startswith(b"PAR1") else None

    def chunks(self, path: Path, reading: Reading, /) -> Iterator[tuple[Events, int]]:
        """Events of a Parquet file, each time with about how many bytes of it were read before."""
        size, done = path.stat().st_size, 0
        try:
            # Buffered streams keep huge row groups, which other writers make, out of memory.
            with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
                names = file.schema_arrow.names
                places = choose_columns(path, names, reading.columns)
                chosen = {role: names[place] for role, place in places.items()}
                num_rows = max(1, file.metadata.num_rows)
                num_values = _num_values(file.metadata, chosen["item"])
                batch_rows = max(1, reading.chunk_events * num_rows // num_values)
                for batch in file.iter_batches(batch_rows, columns=list(chosen.values()), use_threads=False):
                    raw = {role: batch.column(name) for role, name in chosen.items()}
                    yield _events_of_rows(path, raw, done, reading.id_kinds), size * done // num_rows
                    done += batch.num_rows
        except (OSError, KeyError, pa.ArrowException) as error:
            raise DataError(
                f"{path} cannot be read as Parquet: it is cut off, damaged or something else",
                got=excerpt(str(error), 200),
                next_step="write or copy the file again",
            ) from error


def _num_values(metadata: Any, name: str) -> int:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    leaves = [group.column(number) for group in groups for number in range(group.num_columns)]
    return max(1, sum(leaf.num_values for leaf in leaves if leaf.path_in_schema.split(".")[0] == name))


def _events_of_rows(path: Path, raw: dict[str, Any], first_row: int, id_kinds: IdKinds) -> Events:
    """Rows of one event as they are; rows of lists laid end to end."""

    def place(row: int) -> str:
        return f"{path}, row {first_row + row}"

    listed = [role for role, column in raw.items() if _is_list(column.type)]
    if not listed:
        return checked_events(raw, lambda row: (place(row), "that row"), id_kinds)
    if sorted(listed) != sorted(set(raw) - {"user"}):
        raise DataError(
            f"{path} mixes lists and single values",
            got=f"lists in {', '.join(listed)}",
            allowed="one event a row, or one user a row and a list in every other column",
        )
    counts = _list_lengths(raw["item"])
    for role in listed:
        others = _list_lengths(raw[role])
        if (others != counts).any():
            row = int(np.flatnonzero(others != counts)[0])
            raise DataError(
                f"{place(row)}: lists of different lengths",
                got=f"{counts[row]} in item, {others[row]} in {role}",
                allowed="as many of each as there are events",
            )
    ends = np.cumsum(counts)
    flat = {"user": raw["user"].take(pa.array(np.repeat(np.arange(len(counts)), counts)))}
    flat.update({role: raw[role].flatten() for role in listed})
    return checked_events(
        flat, lambda event: (place(int(np.searchsorted(ends, event, "right"))), "a list"), id_kinds
    )


def _is_list(kind: Any) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _list_lengths(lists: Any) -> IntArray:
    return pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
