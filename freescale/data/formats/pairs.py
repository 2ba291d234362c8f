"""Pairs: `user item`, one event a line, already in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from freescale.data.formats._delimited import named_layout, read_delimited, single_blanks
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.preparing.reading.raw_format import RawSample, Reading
from freescale.registry import register


@register("format", "pairs")
class PairsFormat:
    """Two whole numbers a line, between blanks, tabs or the separator the user names."""

    suffixes: tuple[str, ...] = ()
    in_folders = False

    def recognises(self, sample: RawSample, /) -> str | None:
        """By two whole numbers on nearly all lines."""
        # A few broken lines must not make pairs look like sequences: the parser is to name them.
        paired = sample.holds_numbers and sample.widths.count(2) > 0.9 * len(sample.widths)
        return "lines have two whole numbers" if paired else None

    def chunks(self, path: Path, reading: Reading, /) -> Iterator[tuple[Events, int]]:
        """Events in the order of the lines."""
        return read_delimited(
            path,
            reading,
            layout_of=lambda first, others: named_layout(
                path,
                ["user", "item"],
                reading,
                " ",
                plain=lambda data: single_blanks(data, reading.separator),
            ),
        )
