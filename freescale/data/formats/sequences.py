"""Sequences: `user item item item ...`, one user a line, already in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from freescale.data.columns.ids import OtherIdsError, csv_id_types
from freescale.data.formats._delimited import Layout, single_blanks
from freescale.data.formats._text_chunks import TextChunk, text_chunks
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.preparing.reading.raw_format import Chosen, RawSample, Reading
from freescale.data.source import IntArray
from freescale.registry import register

_ONE_TOKEN = Layout(("item",), Chosen({"item": 0}, {}), "\x1f", quoted=False)


@register("format", "sequences")
class SequencesFormat:
    """Ids between blanks, tabs or the separator the user names."""

    suffixes: tuple[str, ...] = ()
    in_folders = False

    def recognises(self, sample: RawSample, /) -> str | None:
        """By lines of unlike numbers of whole numbers."""
        jagged = sample.holds_numbers and len(set(sample.widths)) > 1
        return "lines have different numbers of whole numbers" if jagged else None

    def chunks(self, path: Path, reading: Reading, /) -> Iterator[tuple[Events, int]]:
        """Events of one user after another."""
        reading.values.take({"user": "the first of a line", "item": "the others"}, [])
        for chunk in text_chunks(path, reading.chunk_bytes, quoted=False):
            data = single_blanks(chunk.data, reading.separator)
            if data.strip():
                yield _read_lines(chunk, data, reading), chunk.consumed


def _read_lines(chunk: TextChunk, data: bytes, reading: Reading) -> Events:
    """The events of a chunk, or the error of its first bad token."""
    counts = _tokens_per_line(data)
    # One token a line is the fastest thing to parse; the counts put the lines together again.
    one_a_line = data.replace(b" ", b"\n")
    try:
        # Users and items stand in one column: if one of them is text, both are read as such.
        kinds = csv_id_types(one_a_line, _ONE_TOKEN.separator, reading.values.id_kinds).values()
        kind = pa.string() if pa.string() in kinds else pa.int64()
        tokens = _ONE_TOKEN.parse(one_a_line, {"item": kind})["item"]
        return reading.values.events(_by_role(tokens, counts), None)
    except (ValueError, OtherIdsError):
        words = [token.decode("utf-8", "replace") for token in one_a_line.split(b"\n") if token]
        ends = np.cumsum(np.maximum(counts - 1, 0))

        def locate(event: int) -> tuple[str, str]:
            return chunk.place(chunk.first_line + int(np.searchsorted(ends, event, side="right")))

        return reading.values.events(_by_role(pa.array(words), counts), locate)


def _by_role(tokens: Any, counts: IntArray) -> dict[str, Any]:
    """The first token of a line beside each of the others."""
    counts = counts[counts > 0]
    starts = np.cumsum(counts) - counts
    is_item = np.ones(len(tokens), dtype=bool)
    is_item[starts] = False
    return {
        "user": tokens.take(pa.array(np.repeat(starts, counts - 1))),
        "item": tokens.filter(pa.array(is_item)),
    }


def _tokens_per_line(data: bytes) -> IntArray:
    """Numbers of blank-separated tokens of lines without superfluous blanks."""
    letters = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    spaces = np.searchsorted(np.flatnonzero(letters == ord(" ")), ends)
    counts = np.diff(spaces, prepend=0) + 1
    counts[np.diff(ends, prepend=-1) == 1] = 0
    return counts
