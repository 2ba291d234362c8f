"""CSV: a header, then one event a line; `,` tab `;` or `|` is found by itself."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from freescale.data.event_columns import Events
from freescale.data.formats._delimited import Layout, named_layout, read_delimited
from freescale.data.raw_format import RawSample, Reading
from freescale.registry import register


@register("format", "csv")
class CsvFormat:
    """Columns by name; fields may stand in quotes."""

    suffixes = (".csv", ".tsv")
    in_folders = True

    def recognises(self, sample: RawSample, /) -> str | None:
        """By a first line of names between separators."""
        first = sample.lines[0] if sample.lines else b""
        named = _sniff_separator(first.decode("utf-8", "replace")) and re.match(rb"['\"]?[A-Za-z_]", first)
        return "the first line is a header" if named else None

    def chunks(self, path: Path, reading: Reading, /) -> Iterator[tuple[Events, int]]:
        """Events in the order of the lines."""

        def layout_of(header: str) -> Layout:
            mark = reading.separator or _sniff_separator(header) or ","
            # Lone carriage returns, old line ends that are not read here, would stop the reader.
            fields_of = csv.reader([header.replace("\r", " ")], delimiter=mark)
            names = [name.strip() for name in next(fields_of, [])]
            return named_layout(path, names, reading.columns, mark, quoted=True)

        return read_delimited(
            path,
            reading.chunk_bytes,
            layout_of=layout_of,
            has_header=True,
            quoted=True,
            id_kinds=reading.id_kinds,
        )


def _sniff_separator(header: str) -> str | None:
    """The usual separator that a header has most of, or None if it has none."""
    best = max((",", "\t", ";", "|"), key=header.count)
    return best if best in header else None
