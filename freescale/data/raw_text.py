"""Reads interactions from text: one event a line in columns, or one user a line with its items."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from freescale.data.event_columns import Events
from freescale.data.raw_columns import ColumnNames, Locate, checked_events, choose_columns
from freescale.data.source import IntArray
from freescale.data.text_chunks import TextChunk, text_chunks
from freescale.errors import DataError

_PARSE_BYTES = 4 << 20
_CSV_TYPES = {"user": pa.int64(), "item": pa.int64(), "time": pa.int64(), "action": pa.float64()}


def read_delimited(
    path: Path, kind: str, columns: ColumnNames, separator: str | None, chunk_bytes: int
) -> Iterator[tuple[Events, int]]:
    """Events of text with one event a line, each time with the bytes of the file read so far."""
    layout: _Layout | None = None
    as_text = False
    for chunk in text_chunks(path, chunk_bytes, quoted=kind == "csv"):
        if layout is None:
            header, _, body = chunk.data.partition(b"\n")
            layout = _layout_of(path, kind, header.decode("utf-8", "replace"), columns, separator)
            if kind in ("inter", "csv"):
                chunk = chunk._replace(data=body, first_line=chunk.first_line + 1)
        data = _plain(chunk.data, kind, separator)
        if not data.strip():
            continue
        if not as_text:
            try:
                yield checked_events(layout.parse(data, as_text=False), None), chunk.consumed
                continue
            except ValueError:
                # Fractional times, or something wrong: read text, which serves both. Times stay so.
                as_text = True
        yield _read_as_text(layout, chunk, data), chunk.consumed


def read_sequences(path: Path, separator: str | None, chunk_bytes: int) -> Iterator[tuple[Events, int]]:
    """Events of text with one user a line: the user, then the items in order."""
    layout = _Layout(("item",), ("item",), "\x1f", quoted=False)
    for chunk in text_chunks(path, chunk_bytes, quoted=False):
        data = _plain(chunk.data, "sequences", separator)
        if not data.strip():
            continue
        counts = _tokens_per_line(data)
        # One number a line is the fastest thing to parse; the counts put the lines together again.
        one_a_line = data.replace(b" ", b"\n")
        try:
            numbers = checked_events(layout.parse(one_a_line, as_text=False), None)["item"]
        except ValueError:
            tokens = [token.decode("utf-8", "replace") for token in one_a_line.split(b"\n") if token]
            locate = _line_finder(chunk, np.cumsum(counts))
            numbers = checked_events({"item": pa.array(tokens)}, locate)["item"]
        counts = counts[counts > 0]
        is_user = np.zeros(len(numbers), dtype=bool)
        is_user[np.cumsum(counts) - counts] = True
        yield {"user": np.repeat(numbers[is_user], counts - 1), "item": numbers[~is_user]}, chunk.consumed


def sniff_separator(header: str) -> str | None:
    """The usual separator that a header has most of, or None if it has none."""
    best = max((",", "\t", ";", "|"), key=header.count)
    return best if best in header else None


@dataclass(frozen=True)
class _Layout:
    """How the lines of a delimited text file are laid out."""

    fields: tuple[str, ...]
    roles: tuple[str, ...]
    separator: str
    quoted: bool

    def parse(self, data: bytes, *, as_text: bool) -> dict[str, Any]:
        """The columns that play a part; as text it is slow, but cannot fail on a value."""
        bad_rows: list[Any] = []
        if as_text:
            # Other encodings may stand in columns that do not matter, or in a bad line that is to be shown.
            data = data.decode("utf-8", "replace").encode()

        def skip(row: Any) -> str:
            bad_rows.append(row)
            return "skip"

        table = pyarrow.csv.read_csv(
            pa.BufferReader(data),
            read_options=pyarrow.csv.ReadOptions(
                column_names=self.fields,
                use_threads=not as_text,
                block_size=len(data) if as_text else _PARSE_BYTES,
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=self.separator,
                quote_char='"' if self.quoted else False,
                newlines_in_values=self.quoted and b'"' in data,
                invalid_row_handler=skip if as_text else None,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=self.roles,
                column_types={role: pa.string() if as_text else _CSV_TYPES[role] for role in self.roles},
                null_values=[],
                check_utf8=False,
            ),
        )
        if bad_rows:
            raise _FieldCountError(bad_rows[0].number - 1, bad_rows[0].actual_columns)
        return {role: table[role].combine_chunks() for role in self.roles}


class _FieldCountError(Exception):
    """A line with the wrong number of fields."""

    def __init__(self, record: int, num_fields: int) -> None:
        super().__init__(record, num_fields)
        self.record = record
        self.num_fields = num_fields


def _layout_of(path: Path, kind: str, header: str, columns: ColumnNames, separator: str | None) -> _Layout:
    quoted = False
    if kind == "movielens":
        names, mark = ["user", "item", "action", "time"], "\x1f"
    elif kind == "pairs":
        names, mark = ["user", "item"], " "
    elif kind == "inter":
        names, mark = [name.split(":")[0].strip() for name in header.split("\t")], "\t"
    else:
        mark, quoted = separator or sniff_separator(header) or ",", True
        # Lone carriage returns, old line ends that are not read here, would stop the reader.
        fields_of = csv.reader([header.replace("\r", " ")], delimiter=mark)
        names = [name.strip() for name in next(fields_of, [])]
    chosen = choose_columns(path, names, columns)
    fields = [f"field {number}" for number in range(len(names))]
    for role, place in chosen.items():
        fields[place] = role
    return _Layout(tuple(fields), tuple(chosen), mark, quoted)


def _plain(data: bytes, kind: str, separator: str | None) -> bytes:
    """The same lines with a separator of one character, which the fast parser needs."""
    if kind == "movielens":
        return data.replace(b"::", b"\x1f")
    if kind in ("csv", "inter"):
        return data
    for mark in (separator or "\t", "\t", "\r"):
        data = data.replace(mark.encode(), b" ")
    while b"  " in data:
        data = data.replace(b"  ", b" ")
    return data.replace(b" \n", b"\n").replace(b"\n ", b"\n").lstrip(b" ")


def _read_as_text(layout: _Layout, chunk: TextChunk, data: bytes) -> Events:
    """The events of a chunk that the fast parser refused, or the error of its first bad line."""

    def locate(record: int) -> tuple[str, str]:
        return chunk.place(chunk.line(record, quoted=layout.quoted))

    try:
        raw = layout.parse(data, as_text=True)
    except _FieldCountError as bad:
        where, text = locate(bad.record)
        raise DataError(
            f"{where}: wrong number of fields",
            got=f"{bad.num_fields} in {text}",
            allowed=f"{len(layout.fields)}",
            next_step="correct the line, or name the right format and separator",
        ) from None
    except pa.ArrowInvalid as error:
        where = chunk.place(chunk.first_line)[0]
        raise DataError(f"{where} or below cannot be parsed", got=str(error)) from error
    return checked_events(raw, locate)


def _line_finder(chunk: TextChunk, ends: IntArray) -> Locate:
    return lambda token: chunk.place(chunk.first_line + int(np.searchsorted(ends, token, side="right")))


def _tokens_per_line(data: bytes) -> IntArray:
    """Numbers of blank-separated tokens of lines without superfluous blanks."""
    letters = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    spaces = np.searchsorted(np.flatnonzero(letters == ord(" ")), ends)
    counts = np.diff(spaces, prepend=0) + 1
    counts[np.diff(ends, prepend=-1) == 1] = 0
    return counts
