"""MovieLens' text: `user::item::rating::time`, one event a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from freescale.data.formats._delimited import named_layout, read_delimited
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.preparing.reading.raw_format import RawSample, Reading
from freescale.registry import register

_FIELDS = ["user", "item", "action", "time"]


@register("format", "movielens")
class MovieLensFormat:
    """Four fields between double colons."""

    suffixes: tuple[str, ...] = ()
    in_folders = False

    def recognises(self, sample: RawSample, /) -> str | None:
        """By the double colon."""
        return "'::' stands between the fields" if sample.lines and b"::" in sample.lines[0] else None

    def chunks(self, path: Path, reading: Reading, /) -> Iterator[tuple[Events, int]]:
        """Events in the order of the lines."""
        return read_delimited(
            path,
            reading,
            layout_of=lambda first, others: named_layout(
                path, _FIELDS, reading, "\x1f", plain=lambda data: data.replace(b"::", b"\x1f")
            ),
        )
