"""JSON lines: one object a line, an event or a user with lists; columns by name, `user.id` inside objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json

from freescale.data.columns.ids import OtherIdsError
from freescale.data.excerpt import excerpt
from freescale.data.formats._rows import events_of_rows
from freescale.data.formats._text_chunks import TextChunk, text_chunks
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.preparing.reading.raw_format import Chosen, RawSample, Reading
from freescale.errors import DataError
from freescale.registry import register

_SAMPLE_LINES = 100
_ARRAY_NEXT = "write one object a line first: `jq -c '.[]' INPUT > OUTPUT.jsonl`"


@register("format", "jsonl")
class JsonLinesFormat:
    """One event a line, or one user a line with lists."""

    suffixes = (".jsonl", ".ndjson", ".json")
    in_folders = True

    def recognises(self, sample: RawSample, /) -> str | None:
        """By a brace at the beginning."""
        return "the first line is a JSON object" if sample.lines and sample.lines[0][:1] == b"{" else None

    def chunks(self, path: Path, reading: Reading, /) -> Iterator[tuple[Events, int]]:
        """Events in the order of the lines."""
        lines: _JsonReader | None = None
        for chunk in text_chunks(path, reading.chunk_bytes, quoted=False):
            if not chunk.data.strip():
                continue
            lines = lines or _JsonReader(path, chunk, reading)
            yield lines.read(chunk), chunk.consumed


class _JsonReader:
    """Reads chunks with Arrow, and line by line where that fails or would lose digits."""

    def __init__(self, path: Path, chunk: TextChunk, reading: Reading) -> None:
        if chunk.data.lstrip()[:1] == b"[":
            raise DataError(
                f"{path} is one JSON array",
                got=repr(excerpt(chunk.data.lstrip(), 40)),
                allowed="one JSON object a line",
                next_step=_ARRAY_NEXT,
            )
        self._values = reading.values
        # Lines that are no JSON are told when they are read, not now.
        samples = [row for _, row, _ in _objects(chunk, limit=_SAMPLE_LINES) if row is not None]
        flat = [_flat(row) for row in samples]
        names = list(dict.fromkeys(name for row in flat for name in row))
        self._chosen: Chosen = reading.choose(
            path, names, lambda column: [row.get(names[column]) for row in flat]
        )
        self._names = {role: names[column] for role, column in self._chosen.places.items()}
        self._schema = _schema(samples, self._names)

    def read(self, chunk: TextChunk) -> Events:
        """The events of a chunk, or the error of its first bad line."""
        if self._schema is not None:
            try:
                return self._read_fast(chunk)
            except (DataError, OtherIdsError, ValueError, pa.ArrowException):
                pass  # Line by line, a mistake is told with its place.
        return self._read_slowly(chunk)

    def _read_fast(self, chunk: TextChunk) -> Events:
        table = pyarrow.json.read_json(
            pa.BufferReader(chunk.data),
            read_options=pyarrow.json.ReadOptions(block_size=len(chunk.data) + 1),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=self._schema, unexpected_field_behavior="ignore"
            ),
        )
        raw = {role: table[name].combine_chunks() for role, name in self._names.items()}
        raw = self._chosen.with_constants(raw, table.num_rows)
        return events_of_rows(self._values, raw, None)

    def _read_slowly(self, chunk: TextChunk) -> Events:
        places: list[int] = []
        columns: dict[str, list[Any]] = {role: [] for role in self._names}
        for line, row, why in _objects(chunk):
            if row is None:
                self._values.bad_lines.take(partial(_no_object, chunk, line, why))
                continue
            flat = _flat(row)
            places.append(line)
            for role, name in self._names.items():
                columns[role].append(flat.get(name))
        raw = {role: _array(values) for role, values in columns.items()}
        raw = self._chosen.with_constants(raw, len(places))
        return events_of_rows(self._values, raw, lambda row: chunk.place(places[row])[0])


def _objects(chunk: TextChunk, limit: int | None = None) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
    """Line number, object and, where there is none, why; blank lines are passed over."""
    for number, line in enumerate(chunk.data.split(b"\n")[:limit], start=chunk.first_line):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, None, str(error)
            continue
        yield (number, row, "") if isinstance(row, dict) else (number, None, "no object")


def _no_object(chunk: TextChunk, line: int, why: str) -> DataError:
    where, text = chunk.place(line)
    return DataError(
        f"{where}: not a JSON object",
        got=f"{text} ({why})",
        allowed='one object a line, such as {"user": 1, "item": 2, "time": 1700000000}',
        next_step="correct the line, or skip such lines (`--bad-lines skip`)",
    )


def _flat(row: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Fields of objects inside the object as `outer.inner`."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{before}{name}."))
        else:
            flat[before + name] = value
    return flat


def _schema(samples: list[dict[str, Any]], names: dict[str, str]) -> Any:
    """What Arrow is to expect of each column, from the first lines; None where it would not do."""
    fields = []
    for name in dict.fromkeys(names.values()):
        kinds = {_kind(row.get(name)) for row in samples} - {None}
        if len(kinds) != 1 or "." in name:
            return None
        fields.append((name, kinds.pop()))
    return pa.schema(fields)


def _kind(value: Any) -> Any:
    """The Arrow type of a JSON value; None where nothing is known.

    Whole numbers are never read as floats, which would change large ids: a float among them is read slowly.
    """
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, list):
        inner = {_kind(entry) for entry in value} - {None}
        return pa.list_(inner.pop()) if len(inner) == 1 else None
    known = {int: pa.int64(), float: pa.float64(), str: pa.string()}
    return known.get(type(value))


def _array(values: list[Any]) -> Any:
    """Values of one kind as they are, others as their text; `5` and `"5"` are then the same."""
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return _text_array(values)


def _text_array(values: list[Any]) -> Any:
    if any(isinstance(value, list) for value in values):
        texts = [None if v is None else list(map(_text, v if isinstance(v, list) else [v])) for v in values]
        return pa.array(texts, pa.list_(pa.string()))
    return pa.array([_text(value) for value in values], pa.string())


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
