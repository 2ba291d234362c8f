"""Sequences: `user item item item ...`, one user a line, already in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from freescale.data.columns.ids import IdKind, IdKinds
from freescale.data.columns.values import Locate, checked_events
from freescale.data.event_columns import Events
from freescale.data.formats._delimited import Layout, single_blanks
from freescale.data.formats._text_chunks import TextChunk, text_chunks
from freescale.data.raw_format import RawSample, Reading
from freescale.data.source import IntArray
from freescale.registry import register

_ONE_ID = Layout(("item",), ("item",), "\x1f", quoted=False)


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
            yield _events(chunk, data, reading.id_kinds), chunk.consumed


def _events(chunk: TextChunk, data: bytes, id_kinds: IdKinds) -> Events:
    """The first id of a line is the user of all that follow."""
    # One id a line is the fastest thing to parse; the counts put the lines together again.
    one_a_line = data.replace(b" ", b"\n")
    counts = _tokens_per_line(data)
    locate = _line_finder(chunk, np.cumsum(counts))
    counts = counts[counts > 0]
    first = np.cumsum(counts) - counts
    is_item = np.ones(int(counts.sum()), dtype=bool)
    is_item[first] = False
    of_item = np.flatnonzero(is_item)
    tokens, kinds = _tokens(one_a_line, id_kinds), dict(id_kinds)
    # Users without items are ids, too.
    users = checked_events({"user": tokens.take(pa.array(first))}, lambda n: locate(int(first[n])), kinds)
    items = checked_events({"item": tokens.take(pa.array(of_item))}, lambda n: locate(int(of_item[n])), kinds)
    line = np.repeat(np.arange(len(counts)), counts - 1)
    spread = {
        name: column.take(pa.array(line)) if isinstance(column, pa.Array) else column[line]
        for name, column in users.items()
    }
    return {**spread, **items}


def _tokens(one_a_line: bytes, id_kinds: IdKinds) -> Any:
    """The ids as an Arrow array of numbers, or of text where they are not all numbers."""
    # One column holds users and items: if one of them is text, both are read as such.
    as_text = any(kind != "int64" for kind in id_kinds.values())
    kinds: dict[str, IdKind] = {"item": "text" if as_text else "int64"}
    try:
        tokens = _ONE_ID.parse(one_a_line, as_text=False, id_kinds=kinds)["item"]
        tokens.validate(
            full=True
        )  # bytes that are no UTF-8 are marked below, and then refused with their line
        return tokens
    except ValueError:
        return pa.array([token.decode("utf-8", "replace") for token in one_a_line.split(b"\n") if token])


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
