"""What a raw format is to `prepare`: a way to recognise files and a way to read their events in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from freescale.data.columns.ids import IdKinds
from freescale.data.columns.roles import ColumnNames
from freescale.data.columns.values import checked_events
from freescale.data.event_columns import Events
from freescale.data.formats._text_chunks import suffix_of, text_chunks
from freescale.errors import DataError

_MAX_CHUNK_BYTES = 8 << 20
_SAMPLE_BYTES = 1 << 16
_SAMPLE_LINES = 100


@dataclass(frozen=True)
class RawSample:
    """What can be known of a file before it is read.

    Args:
        path: the file.
        separator: what stands between fields, where the user said so.
    """

    path: Path
    separator: str | None = None

    @property
    def suffix(self) -> str:
        """The extension in lower case, without that of a compression."""
        return suffix_of(self.path)

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB of the file as they are."""
        with self.path.open("rb") as file:
            return file.read(_SAMPLE_BYTES)

    @cached_property
    def lines(self) -> list[bytes]:
        """The first lines that are not blank, unpacked and stripped; none where the file is not text."""
        try:
            return self.read_lines()
        except DataError:
            return []

    @property
    def holds_numbers(self) -> bool:
        """Whether the first line is nothing but whole numbers."""
        return bool(self.lines) and all(
            re.fullmatch(rb"-?\d+", field.strip()) for field in self._fields(self.lines[0])
        )

    @property
    def widths(self) -> list[int]:
        """Number of fields of each line."""
        return [len(self._fields(line)) for line in self.lines]

    def read_lines(self) -> list[bytes]:
        """The same lines as `lines`.

        Raises:
            DataError: the file is not text.
        """
        head = next((chunk.data for chunk in text_chunks(self.path, _SAMPLE_BYTES, quoted=False)), b"")
        return [line.strip() for line in head.splitlines() if line.strip()][:_SAMPLE_LINES]

    def _fields(self, line: bytes) -> list[bytes]:
        return line.split(self.separator.encode() if self.separator else None)


@dataclass(frozen=True)
class Reading:
    """What the user asked for, and how much memory a reader may take.

    Args:
        columns: column names of input that has a header.
        separator: what stands between fields, where the user said so.
        memory: bytes for all of `prepare`; a chunk takes a small part of it.
        id_kinds: how users and items are read; see `columns/ids.py`.
    """

    columns: ColumnNames = field(default_factory=ColumnNames)
    separator: str | None = None
    memory: int = 512 << 20
    id_kinds: IdKinds = field(default_factory=dict)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of text to read at once: an event takes some times its text while it is parsed."""
        return max(64, min(_MAX_CHUNK_BYTES, self.memory // 64))

    @property
    def chunk_events(self) -> int:
        """Events to read at once."""
        return max(64, self.memory // 1024)


@runtime_checkable
class RawFormat(Protocol):
    """A raw format; `@register("format", NAME)` on a class of this shape makes it one.

    Args:
        suffixes: files whose names end so are of this format; may be empty.
        in_folders: whether the files with these suffixes in a folder are read one after another, by name.
    """

    suffixes: tuple[str, ...]
    in_folders: bool

    def recognises(self, sample: RawSample, /) -> str | None:
        """Why this file is of this format, in words for the user; None where it is not."""

    def chunks(self, path: Path, reading: Reading, /) -> Iterator[tuple[Events, int]]:
        """The events in the order of the file, some at a time, with the bytes of the file read so far."""


def checked_chunks(
    name: str, raw_format: RawFormat, path: Path, reading: Reading
) -> Iterator[tuple[Events, int]]:
    """The chunks of a format from outside: any columns of numbers, checked as those of the formats that ship are."""
    before = 0

    def locate(event: int) -> tuple[str, str]:
        return f"{path}, event {before + event}", f"what format {name!r} read"

    for columns, consumed in raw_format.chunks(path, reading):
        events = checked_events(_arrow_columns(name, path, columns), locate, reading.id_kinds)
        yield events, consumed
        before += len(events["user"])


def _arrow_columns(name: str, path: Path, columns: Any) -> dict[str, Any]:
    allowed = "'user' and 'item', and where there are any 'time' and 'action', all of one length"
    given = set(columns) if isinstance(columns, dict) else set()
    if not {"user", "item"} <= given <= {"user", "item", "time", "action"}:
        got = ", ".join(map(str, columns)) if isinstance(columns, dict) else type(columns).__name__
        raise DataError(f"Format {name!r} read other columns from {path}", got=got, allowed=allowed)
    try:
        raw = {role: pa.array(column) for role, column in columns.items()}
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"Format {name!r} read no flat columns from {path}", got=error, allowed=allowed
        ) from error
    if len({len(column) for column in raw.values()}) > 1:
        sizes = ", ".join(f"{len(column)} in {role}" for role, column in raw.items())
        raise DataError(
            f"Format {name!r} read columns of different lengths from {path}", got=sizes, allowed=allowed
        )
    # Arrow arrays from outside may be chunked; the checks want one piece.
    return {
        role: column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        for role, column in raw.items()
    }
