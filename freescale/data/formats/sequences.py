"""Sequences: `user item item item ...`, one user a line, already in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from freescale.data.columns.values import Locate, checked_events
from freescale.data.event_columns import Events
from freescale.data.formats._delimited import Layout, single_blanks
from freescale.data.formats._text_chunks import TextChunk, text_chunks
from freescale.data.raw_format import RawSample, Reading
from freescale.data.source import IntArray
from freescale.registry import register

_ONE_NUMBER = Layout(("item",), ("item",), "\x1f", quoted=False)


@register("format", "sequences")
class SequencesFormat:
    """Whole numbers between blanks, tabs or the separator the user names."""

    suffixes: tuple[str, ...] = ()
    in_folders = False

    def recognises(self, sample: RawSample, /) -> str | None:
        """By lines of unlike numbers of whole numbers."""
        jagged = sample.holds_numbers and len(set(sample.widths)) > 1
        return "lines have different numbers of whole numbers" if jagged else None

    def chunks(self, path: Path, reading: Reading, /) -> Iterator[tuple[Events, int]]:
        """Events of one user after another."""
        for chunk in text_chunks(path, reading.chunk_bytes, quoted=False):
            data = single_blanks(chunk.data, reading.separator)
            if not data.strip():
                continue
            counts = _tokens_per_line(data)
            numbers = _numbers(chunk, data, counts)
            counts = counts[counts > 0]
            is_user = np.zeros(len(numbers), dtype=bool)
            is_user[np.cumsum(counts) - counts] = True
            users = np.repeat(numbers[is_user], counts - 1)
            yield {"user": users, "item": numbers[~is_user]}, chunk.consumed


def _numbers(chunk: TextChunk, data: bytes, counts: IntArray) -> IntArray:
    """All numbers of a chunk in order, or the error of the first that is none."""
    # One number a line is the fastest thing to parse; the counts put the lines together again.
    one_a_line = data.replace(b" ", b"\n")
    try:
        return checked_events(_ONE_NUMBER.parse(one_a_line, as_text=False), None)["item"]
    except ValueError:
        tokens = [token.decode("utf-8", "replace") for token in one_a_line.split(b"\n") if token]
        return checked_events({"item": pa.array(tokens)}, _line_finder(chunk, np.cumsum(counts)))["item"]


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
