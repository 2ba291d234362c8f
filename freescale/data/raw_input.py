"""Raw input as a whole: which format it has, which files, and the events of all of them in order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from freescale.data.event_columns import Events, features_of
from freescale.data.excerpt import excerpt
from freescale.data.manifest import is_dataset
from freescale.data.raw_columns import ColumnNames
from freescale.data.raw_parquet import read_parquet
from freescale.data.raw_text import read_delimited, read_sequences, sniff_separator
from freescale.data.text_chunks import suffix_of, text_chunks
from freescale.errors import DataError

FORMATS = ("auto", "movielens", "inter", "pairs", "sequences", "csv", "parquet")

_SUFFIXES = {"parquet": (".parquet", ".pq"), "csv": (".csv", ".tsv"), "inter": (".inter",)}
_FOLDER_FORMATS = ("parquet", "csv")
_MAX_CHUNK_BYTES = 8 << 20


def check_input(source: Path) -> None:
    """There must be something to read, and it must be raw."""
    if not source.exists():
        raise _nothing(f"There is no input {source}")
    if is_dataset(source):
        raise DataError(f"{source} is already a FreeScale data set", next_step="train on it with data.path")


def find_format(source: Path, separator: str | None) -> tuple[str, str]:
    """The format and the reason, from the name and then from the first lines."""
    if source.is_dir():
        for kind in _FOLDER_FORMATS:
            if _files_of(source, kind):
                return kind, f"the folder holds {kind} files"
        raise _undecided(source, "a folder without csv or parquet files")
    suffix = suffix_of(source)
    for kind, suffixes in _SUFFIXES.items():
        if suffix in suffixes:
            return kind, f"the name ends in {suffix}"
    with source.open("rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet", "it starts like a Parquet file"
    head = next((chunk.data for chunk in text_chunks(source, 1 << 16, quoted=False)), b"")
    lines = [line.strip() for line in head.splitlines() if line.strip()][:100]
    if not lines:
        raise _nothing(f"{source} is empty")
    return _format_of_lines(source, lines, separator)


def read_events(
    source: Path, kind: str, columns: ColumnNames, separator: str | None, memory: int
) -> Iterator[tuple[Events, float]]:
    """All events in input order, with the fraction of the input that has been read."""
    files = _files_of(source, kind)
    if not files:
        raise DataError(f"{source} holds no {kind} files", allowed="for a folder: csv or parquet files")
    size = sum(path.stat().st_size for path in files)
    if not size:
        raise _nothing(f"{source} is empty")
    done = num_events = 0
    features: list[str] | None = None
    for path in files:
        for events, consumed in _read_file(path, kind, columns, separator, memory):
            found = list(features_of(events))
            features = features or found
            if found != features:
                raise DataError(f"{path} has other columns than {files[0]}", got=found, allowed=features)
            num_events += len(events["user"])
            yield events, min(1.0, (done + consumed) / size)
        done += path.stat().st_size
    if not num_events:
        raise _nothing(f"{source} has no events, at most a header")


def _read_file(
    path: Path, kind: str, columns: ColumnNames, separator: str | None, memory: int
) -> Iterator[tuple[Events, int]]:
    chunk_bytes = max(64, min(_MAX_CHUNK_BYTES, memory // 64))
    if kind == "parquet":
        return read_parquet(path, columns, max(64, memory // 1024))
    if kind == "sequences":
        return read_sequences(path, separator, chunk_bytes)
    return read_delimited(path, kind, columns, separator, chunk_bytes)


def _files_of(source: Path, kind: str) -> list[Path]:
    if not source.is_dir():
        return [source]
    suffixes = _SUFFIXES[kind] if kind in _FOLDER_FORMATS else ()
    files = (path for path in source.iterdir() if path.is_file() and path.name[0] not in "._")
    return sorted(path for path in files if suffix_of(path) in suffixes)


def _format_of_lines(source: Path, lines: list[bytes], separator: str | None) -> tuple[str, str]:
    if b"::" in lines[0]:
        return "movielens", "'::' stands between the fields"
    if re.search(rb"^\w+:(token|float)(_seq)?\b", lines[0]):
        return "inter", "the first line names columns and their types"
    mark = separator.encode() if separator else None
    widths = [len(line.split(mark)) for line in lines]
    if all(re.fullmatch(rb"-?\d+", field.strip()) for field in lines[0].split(mark)):
        # A few broken lines must not make pairs look like sequences: the parser is to name them.
        if widths.count(2) > 0.9 * len(widths):
            return "pairs", "lines have two whole numbers"
        if len(set(widths)) > 1:
            return "sequences", "lines have different numbers of whole numbers"
    elif sniff_separator(lines[0].decode("utf-8", "replace")) and re.match(rb"['\"]?[A-Za-z_]", lines[0]):
        return "csv", "the first line is a header"
    raise _undecided(source, repr(excerpt(lines[0])))


def _nothing(what: str) -> DataError:
    return DataError(what, next_step="check the path of the raw interactions")


def _undecided(source: Path, got: str) -> DataError:
    return DataError(
        f"Cannot tell the format of {source}",
        got=got,
        allowed=", ".join(FORMATS[1:]),
        next_step="name the format (`--format`); csv needs a first line that names the columns",
    )
