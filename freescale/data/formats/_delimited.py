"""Reads text with one event a line: fields between separators, parsed fast, and once more as text where that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.csv

from freescale.data.columns.ids import IdKinds, OtherIdsError, csv_id_types
from freescale.data.columns.roles import ColumnNames, choose_columns
from freescale.data.columns.values import checked_events
from freescale.data.event_columns import Events
from freescale.data.formats._text_chunks import TextChunk, text_chunks
from freescale.errors import DataError

_PARSE_BYTES = 4 << 20
_CSV_TYPES = {"user": pa.int64(), "item": pa.int64(), "time": pa.int64(), "action": pa.float64()}


def read_delimited(
    path: Path,
    chunk_bytes: int,
    *,
    layout_of: Callable[[str], Layout],
    has_header: bool = False,
    quoted: bool = False,
    plain: Callable[[bytes], bytes] | None = None,
    id_kinds: IdKinds = MappingProxyType({}),
) -> Iterator[tuple[Events, int]]:
    """Events of text with one event a line, each time with the bytes of the file read so far.

    Args:
        path: the file.
        chunk_bytes: text to read at once.
        layout_of: the layout of all lines, from the first one.
        has_header: whether the first line is no event.
        quoted: whether fields may stand in quotes and hold line ends.
        plain: the same lines with a separator of one character, which the fast parser needs.
        id_kinds: of users and items.
    """
    layout: Layout | None = None
    as_text = False
    for chunk in text_chunks(path, chunk_bytes, quoted=quoted):
        if layout is None:
            header, _, body = chunk.data.partition(b"\n")
            layout = layout_of(header.decode("utf-8", "replace"))
            if has_header:
                chunk = chunk._replace(data=body, first_line=chunk.first_line + 1)
        data = plain(chunk.data) if plain else chunk.data
        if not data.strip():
            continue
        if not as_text:
            try:
                raw = layout.parse(data, as_text=False, id_kinds=id_kinds)
                yield checked_events(raw, None, id_kinds), chunk.consumed
                continue
            except (ValueError, OtherIdsError):
                # Fractional times, or something wrong: read text, which serves both. Times stay so.
                as_text = True
        yield _read_as_text(layout, chunk, data, id_kinds), chunk.consumed


def named_layout(
    path: Path, names: list[str], columns: ColumnNames, separator: str, *, quoted: bool = False
) -> Layout:
    """The layout of lines whose fields have these names; columns that play no part are skipped."""
    chosen = choose_columns(path, names, columns)
    fields = [f"field {number}" for number in range(len(names))]
    for role, place in chosen.items():
        fields[place] = role
    return Layout(tuple(fields), tuple(chosen), separator, quoted)


def single_blanks(data: bytes, separator: str | None) -> bytes:
    """The same lines with one blank between fields and none around them."""
    for mark in (separator or "\t", "\t", "\r"):
        data = data.replace(mark.encode(), b" ")
    while b"  " in data:
        data = data.replace(b"  ", b" ")
    return data.replace(b" \n", b"\n").replace(b"\n ", b"\n").lstrip(b" ")


@dataclass(frozen=True)
class Layout:
    """How the lines of a delimited text file are laid out."""

    fields: tuple[str, ...]
    roles: tuple[str, ...]
    separator: str
    quoted: bool

    def parse(
        self, data: bytes, *, as_text: bool, id_kinds: IdKinds = MappingProxyType({})
    ) -> dict[str, Any]:
        """The columns that play a part; as text it is slow, but cannot fail on a value."""
        bad_rows: list[Any] = []
        if as_text:
            # Other encodings may stand in columns that do not matter, or in a bad line that is to be shown.
            data = data.decode("utf-8", "replace").encode()

        def skip(row: Any) -> str:
            bad_rows.append(row)
            return "skip"

        types = {**_CSV_TYPES, **csv_id_types(data, self.separator, id_kinds)}
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
                column_types={role: pa.string() if as_text else types[role] for role in self.roles},
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


def _read_as_text(layout: Layout, chunk: TextChunk, data: bytes, id_kinds: IdKinds) -> Events:
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
    return checked_events(raw, locate, id_kinds)
