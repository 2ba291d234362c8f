"""RecBole's text: tab-separated, and the first line names the columns and their types (`user_id:token`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from freescale.data.formats._delimited import Layout, named_layout, read_delimited
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.preparing.reading.raw_format import RawSample, Reading
from freescale.registry import register


@register("format", "inter")
class InterFormat:
    """Typed names, then one event a line."""

    suffixes = (".inter",)
    in_folders = False

    def recognises(self, sample: RawSample, /) -> str | None:
        """By the type of the first column."""
        typed = sample.lines and re.search(rb"^\w+:(token|float)(_seq)?\b", sample.lines[0])
        return "the first line names columns and their types" if typed else None

    def chunks(self, path: Path, reading: Reading, /) -> Iterator[tuple[Events, int]]:
        """Events in the order of the lines."""

        def layout_of(header: str, others: list[str]) -> Layout:
            names = [name.split(":")[0].strip() for name in header.split("\t")]
            rows = [line.split("\t") for line in others]
            return named_layout(path, names, reading, "\t", rows=rows)

        return read_delimited(path, reading, layout_of=layout_of, has_header=True)
