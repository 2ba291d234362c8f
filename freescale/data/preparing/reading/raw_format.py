"""What a raw format is to `prepare`: a way to recognise files and a way to read their events in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from freescale.data.columns.roles import ROLES, ColumnNames, Sample, choose_columns
from freescale.data.columns.values import ValueReader
from freescale.data.formats._text_chunks import suffix_of, text_chunks
from freescale.data.preparing.reading.event_columns import Events
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


class Chosen(NamedTuple):
    """Which part is played by which column of a file, and which by a folder such as `dt=2024-01-31`."""

    places: dict[str, int]
    constants: dict[str, str | None]

    def with_constants(self, raw: dict[str, Any], num_events: int) -> dict[str, Any]:
        """The columns of the file and those of its folders."""
        for role, value in self.constants.items():
            raw[role] = pa.repeat(pa.scalar(value, pa.string()), num_events)
        return raw


@dataclass(frozen=True)
class Reading:
    """What the user asked for, and how much memory a reader may take.

    Args:
        columns: column names of input that has a header.
        separator: what stands between fields, where the user said so.
        header: names of the fields of text without a header line; `_` for one that nobody needs.
        memory: bytes for all of `prepare`; a chunk takes a small part of it.
        partition: what the folders of this file say: name -> value, None for nothing.
        values: turns raw columns into events; one for all files of an input.
        roles: parts that its columns play, besides the features of a schema.
        required: those of them that a schema names, so that they must be there.
    """

    columns: ColumnNames = field(default_factory=ColumnNames)
    separator: str | None = None
    header: tuple[str, ...] | None = None
    memory: int = 512 << 20
    partition: Mapping[str, str | None] = field(default_factory=dict)
    values: ValueReader = field(default_factory=ValueReader)
    roles: tuple[str, ...] = tuple(ROLES)
    required: tuple[str, ...] = ()

    def choose(self, path: Path, names: list[str], sample: Sample | None = None) -> Chosen:
        """Which part each column of this file plays; the folders it lies in count as columns, too."""
        # A column of the file wins: some writers keep it in both.
        folders = [name for name in self.partition if name not in names]
        every = [*names, *folders]

        def any_sample(column: int) -> Any:
            if column >= len(names):
                return [self.partition[every[column]]]
            return sample(column) if sample else []

        features = self.values.features.features.values()
        chosen = choose_columns(
            path, every, self.columns, any_sample, roles=self.roles, required=self.required, features=features
        )
        self.values.take({role: every[place] for role, place in chosen.items()}, every)
        return Chosen(
            {role: place for role, place in chosen.items() if place < len(names)},
            {role: self.partition[every[place]] for role, place in chosen.items() if place >= len(names)},
        )

    @property
    def owner(self) -> str | None:
        """Whose file it is, "item" or "user"; None of events."""
        return self.roles[0] if len(self.roles) == 1 else None

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
        raw = _arrow_columns(name, path, columns, reading)
        reading.values.take({role: role for role in raw}, [])
        yield reading.values.events(raw, locate), consumed
        before += len(next(iter(raw.values())))


def _arrow_columns(name: str, path: Path, columns: Any, reading: Reading) -> dict[str, Any]:
    needed = [role for role in ("user", "item") if role in reading.roles]
    features = list(reading.values.features.features)
    allowed = (
        f"{' and '.join(map(repr, needed))}, and where there are any 'time' and 'action', all of one length"
    )
    if features:
        allowed += f"; the features {', '.join(features)}"
    given = set(columns) if isinstance(columns, dict) else set()
    if not {*needed, *features} <= given <= {"user", "item", "time", "action", *features}:
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
