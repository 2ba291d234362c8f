"""Reads interactions from Parquet: one event a row, or one user a row with lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.excerpt import excerpt
from freescale.data.formats._rows import events_of_rows
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.preparing.reading.raw_format import RawSample, Reading
from freescale.errors import DataError
from freescale.registry import register

_SAMPLE_ROWS = 20


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

        def place(row: int) -> str:
            return f"{path}, row {done + row}"

        try:
            # Buffered streams keep huge row groups, which other writers make, out of memory.
            with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
                names = file.schema_arrow.names
                chosen = reading.choose(path, names, lambda column: _first_values(file, names[column]))
                columns = {role: names[column] for role, column in chosen.places.items()}
                num_rows = max(1, file.metadata.num_rows)
                num_values = _num_values(file.metadata, columns.get("item", names[0]))
                batch_rows = max(1, reading.chunk_events * num_rows // num_values)
                for batch in file.iter_batches(
                    batch_rows, columns=[*dict.fromkeys(columns.values())], use_threads=False
                ):
                    raw = {role: batch.column(name) for role, name in columns.items()}
                    raw = chosen.with_constants(raw, batch.num_rows)
                    yield events_of_rows(reading.values, raw, place), size * done // num_rows
                    done += batch.num_rows
        except (OSError, KeyError, pa.ArrowException) as error:
            raise unreadable(path, error) from error


def unreadable(path: object, error: Exception) -> DataError:
    """What is said of a file that is no Parquet, or no longer."""
    return DataError(
        f"{path} cannot be read as Parquet: it is cut off, damaged or something else",
        got=excerpt(str(error), 200),
        next_step="write or copy the file again",
    )


def _first_values(file: Any, name: str) -> list[Any]:
    batch = next(file.iter_batches(_SAMPLE_ROWS, columns=[name], use_threads=False), None)
    return [] if batch is None else batch.column(0).to_pylist()


def _num_values(metadata: Any, name: str) -> int:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    leaves = [group.column(number) for group in groups for number in range(group.num_columns)]
    return max(1, sum(leaf.num_values for leaf in leaves if leaf.path_in_schema.split(".")[0] == name))
