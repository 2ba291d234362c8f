"""A table of any length as one Parquet file, part by part."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_parts(path: Path, parts: Iterable[Any]) -> None:
    """One after the other, each as it comes; the first one tells the columns, and without any there is no file."""
    import pyarrow.parquet as pq

    writer: Any = None
    try:
        for part in parts:
            writer = writer or pq.ParquetWriter(path, part.schema)
            writer.write_table(part)
    finally:
        if writer is not None:
            writer.close()
