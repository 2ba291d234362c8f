"""Reads text with one event a line: fields between separators, parsed fast, and once more as text where that fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from freescale.data.columns.ids import OtherIdsError, csv_id_types
from freescale.data.formats._text_chunks import TextChunk, text_chunks
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.preparing.reading.raw_format import Chosen, Reading
from freescale.errors import DataError

_PARSE_BYTES = 4 << 20
_FAST_TYPES = {"user": pa.int64(), "item": pa.int64(), "time": pa.int64(), "action": pa.float64()}


def read_delimited(
    path: Path,
    reading: Reading,
    *,
    layout_of: Callable[[str, list[str]], Layout],
    has_header: bool = False,
    quoted: bool = False,
) -> Iterator[tuple[Events, int]]:
    """Events of text with one event a line, each time with the bytes of the file read so far.

    Args:
        path: the file.
        reading: how to read it.
        layout_of: the layout of all lines, from the first one and some of the others.
        has_header: whether the first line is no event.
        quoted: whether fields may stand in quotes and hold line ends.
    """
    lines: _LineReader | None = None
    for chunk in text_chunks(path, reading.chunk_bytes, quoted=quoted):
        if chunk.data.isspace():
            continue
        if lines is None:
            chunk = chunk.without_blank_start()
            header, body = chunk.split_first()
            others = (body if has_header else chunk).first_lines()
            lines = _LineReader(layout_of(header, others), reading)
            chunk = body if has_header else chunk
        data = lines.layout.plain(chunk.data) if lines.layout.plain else chunk.data
        if data and not data.isspace():
            yield lines.read(chunk, data), chunk.consumed


def named_layout(
    path: Path,
    names: list[str],
    reading: Reading,
    separator: str,
    *,
    rows: list[list[str]] | None = None,
    quoted: bool = False,
    plain: Callable[[bytes], bytes] | None = None,
) -> Layout:
    """The layout of lines whose fields have these names; columns that play no part are skipped.

    Args:
        path: the file, for messages.
        names: of the fields, in their order.
        reading: how to read it.
        separator: one character.
        rows: fields of some lines.
        quoted: whether fields may stand in quotes.
        plain: the same lines with a separator of one character, which the fast parser needs.
    """
    chosen = reading.choose(path, names, lambda place: [row[place] for row in rows or [] if len(row) > place])
    fields = [f"field {number}" for number in range(len(names))]
    for role, place in chosen.places.items():
        if fields[place].startswith("field "):
            fields[place] = role
    return Layout(tuple(fields), chosen, separator, quoted, plain)


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
    chosen: Chosen
    separator: str
    quoted: bool
    plain: Callable[[bytes], bytes] | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """The parts that fields play."""
        return tuple(self.chosen.places)

    def parse(
        self, data: bytes, types: dict[str, Any], *, on_bad_row: Callable[[Any], str] | None = None
    ) -> dict[str, Any]:
        """The columns that play a part, as these types; with `on_bad_row` slowly, line by line."""
        careful = on_bad_row is not None
        # A column may be read as several features.
        names = {role: self.fields[place] for role, place in self.chosen.places.items()}
        table = pyarrow.csv.read_csv(
            pa.BufferReader(data),
            read_options=pyarrow.csv.ReadOptions(
                column_names=self.fields,
                use_threads=not careful,
                block_size=len(data) if careful else _PARSE_BYTES,
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=self.separator,
                quote_char='"' if self.quoted else False,
                newlines_in_values=self.quoted and b'"' in data,
                invalid_row_handler=on_bad_row,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=list(dict.fromkeys(names.values())),
                column_types={name: kind for name, kind in types.items() if name in self.fields},
                null_values=[],
                check_utf8=True,
            ),
        )
        raw = {role: table[name].combine_chunks() for role, name in names.items()}
        return self.chosen.with_constants(raw, table.num_rows)


class _LineReader:
    """Reads one chunk after another, and learns which columns are text on the way."""

    def __init__(self, layout: Layout, reading: Reading) -> None:
        self.layout = layout
        self._values = reading.values
        self._types: dict[str, Any] | None = {
            role: pa.string() if role in reading.values.features else _FAST_TYPES[role]
            for role in layout.roles
        }

    def read(self, chunk: TextChunk, data: bytes) -> Events:
        """The events of a chunk, or the error of its first bad line."""
        if self.layout.quoted and data.count(b'"') % 2:
            self._check_closed(chunk, data)
        if self._types is not None:
            ids = csv_id_types(data, self.layout.separator, self._values.id_kinds)
            texts = {role: kind for role, kind in ids.items() if role in self._types and kind == pa.string()}
            try:
                return self._values.events(self.layout.parse(data, {**self._types, **texts}), None)
            except (ValueError, OtherIdsError):
                pass  # As text, what is wrong is told with its place.
        return self._read_as_text(chunk, data)

    def _read_as_text(self, chunk: TextChunk, data: bytes) -> Events:
        """All columns as text: slow, but it cannot fail on a value."""
        # Other encodings may stand in columns that do not matter, or in a bad line that is to be shown.
        data = data.decode("utf-8", "replace").encode()
        bad_rows: list[Any] = []

        def skip(row: Any) -> str:
            bad_rows.append(row)
            return "skip"

        types = dict.fromkeys(self.layout.roles, pa.string())
        try:
            raw = self.layout.parse(data, types, on_bad_row=skip)
        except pa.ArrowInvalid as error:
            where = chunk.place(chunk.first_line)[0]
            raise DataError(
                f"{where} or below cannot be parsed",
                got=str(error),
                next_step="check quotes and separators there, or name the right `--separator`",
            ) from error
        # Lines with a wrong number of fields are not among the records that were read.
        wrong = [row.number - 1 for row in bad_rows]
        place = _Places(chunk, data, quoted=self.layout.quoted, left_out=wrong)
        num_skipped = self._values.bad_lines.num_skipped
        for record, row in zip(wrong, bad_rows):
            self._values.bad_lines.take(partial(self._wrong_fields, place, record, row.actual_columns))
        events = self._values.events(raw, place.of_read)
        self._learn(raw, explained=self._values.bad_lines.num_skipped > num_skipped)
        return events

    def _check_closed(self, chunk: TextChunk, data: bytes) -> None:
        """A quote that is never closed hides all lines behind it, whether such lines are skipped or not."""
        start = b"(?:^|(?<=[\n" + re.escape(self.layout.separator.encode()) + b']))"'
        open_quote = re.search(start, re.sub(start + b'(?:[^"]|"")*"', lambda m: b" " * len(m[0]), data))
        if open_quote:
            where, text = chunk.place(chunk.first_line + data.count(b"\n", 0, open_quote.start()))
            raise DataError(
                f"{where}: a quote is never closed",
                got=text,
                allowed='fields such as "a, b", quotes in them twice: "say ""so"""',
                next_step="close it, or leave quotes out",
            )

    def _wrong_fields(self, place: _Places, record: int, num_fields: int) -> DataError:
        where, text = place.of_any(record)
        return DataError(
            f"{where}: wrong number of fields",
            got=f"{num_fields} in {text}",
            allowed=f"{len(self.layout.fields)}",
            next_step="correct the line, skip such lines (`--bad-lines skip`), or name the right format, "
            "`--separator` or `--columns`",
        )

    def _learn(self, raw: dict[str, Any], *, explained: bool) -> None:
        """Columns that are no numbers are text from now on; if that explains nothing, all are."""
        if self._types is None or not len(next(iter(raw.values()))):
            return
        found = {role: _type_of(raw[role], kind) for role, kind in self._types.items()}
        self._types = None if found == self._types and not explained else found


class _Places:
    """Where the records of a chunk stand in the file; worked out only when asked for."""

    def __init__(self, chunk: TextChunk, data: bytes, *, quoted: bool, left_out: list[int]) -> None:
        self._chunk = chunk
        self._data = data
        self._quoted = quoted
        self._left_out = set(left_out)

    def of_any(self, record: int) -> tuple[str, str]:
        """Where a record is, and its text, among all of the chunk."""
        # A lone carriage return is a line end to the parser and none here.
        return self._chunk.place(self._lines[min(record, len(self._lines) - 1)])

    def of_read(self, record: int) -> tuple[str, str]:
        """The same among those that had the right number of fields."""
        return self.of_any(self._read[record])

    @cached_property
    def _lines(self) -> list[int]:
        return self._chunk._replace(data=self._data).record_lines(quoted=self._quoted)

    @cached_property
    def _read(self) -> list[int]:
        num_records = len(self._lines) + self._data.count(b"\r")
        return [record for record in range(num_records) if record not in self._left_out]


def _type_of(texts: Any, fast: Any) -> Any:
    try:
        texts.cast(fast)
        return fast
    except pa.ArrowInvalid:
        return pa.string()
