"""CSV: a header, then one event a line; the separator is found by itself, and `--columns` stands for a header."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from freescale.data.columns.roles import IGNORED, looks_like_header
from freescale.data.excerpt import excerpt
from freescale.data.formats._delimited import Layout, named_layout, read_delimited, single_blanks
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.preparing.reading.raw_format import RawSample, Reading
from freescale.errors import DataError
from freescale.registry import register

_SEPARATORS = (",", "\t", ";", "|", "\x01", "~", "^", "::", "||")
# Stands for a separator of several characters, which the fast parser does not know.
_ONE_MARK = "\x1f"


@register("format", "csv")
class CsvFormat:
    """Columns by name; fields may stand in quotes."""

    suffixes = (".csv", ".tsv", ".psv")
    in_folders = True

    def recognises(self, sample: RawSample, /) -> str | None:
        """By a first line of names between separators."""
        first = sample.lines[0] if sample.lines else b""
        named = _sniff_separator(first.decode("utf-8", "replace")) and re.match(rb"['\"]?[A-Za-z_]", first)
        return "the first line is a header" if named else None

    def chunks(self, path: Path, reading: Reading, /) -> Iterator[tuple[Events, int]]:
        """Events in the order of the lines."""

        def layout_of(first: str, others: list[str]) -> Layout:
            _check_no_note(path, first)
            mark = reading.separator or _sniff_separator(first) or (" " if reading.header else ",")
            rows = [_fields(line, mark) for line in others]
            names = [name.strip() for name in _fields(first, mark)]
            if reading.header is not None:
                _check_headerless(path, names, reading.header, reading.owner)
                names = list(reading.header)
            if mark == " ":
                plain = partial(single_blanks, separator=None)
                return named_layout(path, names, reading, mark, rows=rows, quoted=True, plain=plain)
            if len(mark) == 1:
                return named_layout(path, names, reading, mark, rows=rows, quoted=True)
            plain = partial(_with_one_mark, mark=mark.encode())
            return named_layout(path, names, reading, _ONE_MARK, rows=rows, quoted=True, plain=plain)

        has_header = reading.header is None
        return read_delimited(path, reading, layout_of=layout_of, has_header=has_header, quoted=True)


def _fields(line: str, mark: str) -> list[str]:
    if mark == " ":
        return line.split()
    # Lone carriage returns, old line ends that are not read here, would stop the reader.
    line = line.replace("\r", " ").replace(mark, _ONE_MARK)
    return next(csv.reader([line], delimiter=_ONE_MARK), [])


def _with_one_mark(data: bytes, *, mark: bytes) -> bytes:
    return data.replace(mark, _ONE_MARK.encode())


def _check_no_note(path: Path, first: str) -> None:
    if re.fullmatch(r"['\"]?sep=.{1,2}['\"]?", first.strip()):
        raise DataError(
            f"{path}: the first line is a note to Excel, not a header",
            got=repr(first),
            next_step="leave it out: `tail -n +2 INPUT > OUTPUT`",
        )


def _check_headerless(path: Path, first: list[str], header: tuple[str, ...], owner: str | None) -> None:
    """A header that `--columns` denies would be read as an event; `owner` is whose file it is if not of events."""
    option = f"--{owner}-columns" if owner else "--columns"
    named = any(name == given != IGNORED for name, given in zip(first, header, strict=False))
    if looks_like_header(first) or named:
        raise DataError(
            f"{path} has a header, and the names of its columns were given, too",
            got=excerpt(", ".join(first)),
            next_step=f"leave `{option}` out, and in the first line call the column of the ids as the events do, or id"
            if owner
            else "leave `--columns` out, and name columns with `--user`, `--item`, `--time`, `--action`",
        )
    if len(first) != len(header):
        raise DataError(
            f"{path}: `{option}` names {len(header)} fields, and the first line has {len(first)}",
            got=excerpt(", ".join(first)),
            allowed=f"{len(first)} names, such as {f'{owner},...' if owner else 'user,item,time,action'}; "
            "`_` for a field that nobody needs",
            next_step="name every field" + ("" if owner else ", or set the right `--separator`"),
        )


def _sniff_separator(line: str) -> str | None:
    """The usual separator that a line has most of, or None if it has none; of two alike the longer one."""
    best = max(_SEPARATORS, key=lambda mark: (line.count(mark) * len(mark), len(mark)))
    return best if best in line else None
