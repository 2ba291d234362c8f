"""Turns raw interactions into a FreeScale data set: one sorted history a user, in Parquet, in bounded memory.

The input is read in chunks. Events that outgrow the memory budget are spilled as runs sorted by user and time
and merged back one range of users at a time. So users come out in ascending order, and the files are the same
whatever the budget. Beyond `memory_mb` only some bytes for every user and every item are held.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from freescale.data.parquet_source import (
    DATASET_FILE,
    DATASET_FORMAT,
    DATASET_VERSION,
    FEATURE_DTYPES,
    ITEMS_FILE,
    LENGTHS_FILE,
    is_dataset,
)
from freescale.data.source import IntArray
from freescale.errors import DataError, nearest

FORMATS = ("auto", "movielens", "inter", "pairs", "sequences", "csv", "parquet")
Progress = Callable[[float, str], None]
# One flat array a column: "user", "item", and where the data has them "time", "action". "fraction" is what
# rounding took from fractional times; it only breaks ties of "time" and is not stored.
Events = dict[str, npt.NDArray[Any]]
# From the number of a value to its place in the input and the text around it.
Locate = Callable[[int], tuple[str, str]]

_ROW_GROUP_USERS = 1024
_ROW_GROUP_EVENTS = 1 << 20
_SHARD_BYTES = 64 << 20
_RUN_BATCHES = 256
_MAX_CHUNK_BYTES = 8 << 20
_MAX_LINE_BYTES = 64 << 20
_MAX_INT64 = 2**63 - 1
_READING_SHARE = 0.6  # of the whole time, measured on text input

_GUESSES = {
    "user": ("user", "userid", "uid"),
    "item": ("item", "itemid", "iid", "movieid", "productid", "asin", "parentasin"),
    "time": ("time", "timestamp", "ts", "unixreviewtime"),
    "action": ("action", "rating"),
}
_ALLOWED = {
    "user": f"whole numbers from 0 to {_MAX_INT64}",
    "item": f"whole numbers from 0 to {_MAX_INT64}",
    "time": "finite numbers, such as seconds since 1970",
    "action": "finite numbers, such as a rating",
}
_REMEDY = {
    "user": "correct the input, or number the users from 0 first",
    "item": "correct the input, or number the items from 0 first",
    "time": "correct the input, or set the time column to '' to keep the order of the file",
    "action": "correct the input, or set the action column to '' to leave it out",
}


@dataclass(frozen=True)
class ColumnNames:
    """Which column of csv, inter or parquet input plays which part.

    None looks for usual names such as user_id, itemId, timestamp, rating; "" leaves an optional column out.
    """

    user: str | None = None
    item: str | None = None
    time: str | None = None
    action: str | None = None


_USUAL_NAMES = ColumnNames()


@dataclass(frozen=True)
class DatasetSummary:
    """What `prepare` wrote; `decided` says how the format was found."""

    path: Path
    name: str
    source_format: str
    decided: str
    num_users: int
    num_events: int
    num_items: int
    max_item: int
    features: tuple[str, ...]
    dropped_users: int
    num_shards: int


def prepare(
    input_path: str | Path,
    out_dir: str | Path,
    *,
    format: str = "auto",
    columns: ColumnNames = _USUAL_NAMES,
    separator: str | None = None,
    min_events: int = 3,
    memory_mb: float = 512,
    name: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> DatasetSummary:
    """Write the data set of these interactions into a new folder, or nothing at all.

    Events of a user are ordered by time; equal times, and data without times, keep the order of the input.
    Fractional times are ordered exactly and stored rounded to whole numbers.

    Args:
        input_path: a file, or for csv and parquet a folder of files that are read in name order.
        out_dir: folder to create; an existing data set there is replaced only with `overwrite`.
        format: one of `FORMATS`; "auto" looks at the name and the first lines.
        columns: column names of input that has a header.
        separator: what stands between fields of csv, pairs or sequences, where it is not found by itself.
        min_events: users with fewer events are dropped; three are needed for train, validation and test.
        memory_mb: memory for sorting events, in MiB; reading and writing take some 100 MiB by themselves.
        name: name of the data set; that of the folder unless given.
        overwrite: replace an existing data set.
        progress: called with the fraction done and what is being done.
    """
    source, out = Path(input_path), Path(out_dir).resolve()
    _check_options(format, separator=separator, min_events=min_events, memory_mb=memory_mb)
    _check_target(source, out, overwrite=overwrite)
    report = progress or (lambda fraction, message: None)
    memory = int(memory_mb * 2**20)
    work = out.with_name(f"{out.name}.tmp-{os.getpid()}-{secrets.token_hex(3)}")
    sorter = _EventSorter(work / "spill", memory)
    writer: _DatasetWriter | None = None
    try:
        kind, decided = _detect(source, separator) if format == "auto" else (format, "as asked for")
        work.mkdir(parents=True)
        for events, fraction in _read_all(source, kind, columns, separator, memory):
            sorter.add(events)
            report(fraction * _READING_SHARE, f"reading {source.name}")
        writer = _DatasetWriter(work, sorter.features, min_events)
        for events, fraction in sorter.blocks():
            writer.add(events)
            report(_READING_SHARE + fraction * (1 - _READING_SHARE), f"writing {out.name}")
        manifest = writer.finish(name or out.name, kind)
        shutil.rmtree(work / "spill", ignore_errors=True)
        _publish(work, out)
    except OSError as error:
        raise _io_problem(error, out) from error
    finally:
        if writer is not None:
            writer.abort()
        shutil.rmtree(work, ignore_errors=True)
    return _summary(out, manifest, decided)


def _summary(out: Path, manifest: dict[str, Any], decided: str) -> DatasetSummary:
    counts = {
        key: manifest[key] for key in ("num_users", "num_events", "num_items", "max_item", "dropped_users")
    }
    return DatasetSummary(
        path=out,
        name=manifest["name"],
        source_format=manifest["source_format"],
        decided=decided,
        features=tuple(manifest["features"]),
        num_shards=len(manifest["shards"]),
        **counts,
    )


# ---- the target folder ----


def _check_options(format: str, *, separator: str | None, min_events: int, memory_mb: float) -> None:
    if format not in FORMATS:
        guess = nearest(format, FORMATS)
        raise DataError(
            "Unknown input format",
            got=format,
            allowed=", ".join(FORMATS),
            next_step=f"did you mean {guess!r}?" if guess else None,
        )
    if separator is not None and (len(separator) != 1 or not separator.isascii()):
        raise DataError(
            "A separator is one ASCII character", got=repr(separator), allowed="such as ',' or ';'"
        )
    if min_events < 1:
        raise DataError("min_events is too small", got=min_events, allowed="1 or more")
    if memory_mb <= 0:
        raise DataError("memory_mb is too small", got=memory_mb, allowed="more than 0; 512 is a good start")


def _check_target(source: Path, out: Path, *, overwrite: bool) -> None:
    if not source.exists():
        raise DataError(f"There is no input {source}", next_step="check the path of the raw interactions")
    if is_dataset(source):
        raise DataError(f"{source} is already a FreeScale data set", next_step="train on it with data.path")
    if out == source.resolve() or out in source.resolve().parents:
        raise DataError(
            "The output folder would hold its own input", got=out, next_step="name another folder"
        )
    if out.exists() and not out.is_dir():
        raise DataError(f"The output {out} is a file", next_step="name a folder that does not exist yet")
    if not out.exists() or not any(out.iterdir()):
        return
    if not is_dataset(out):
        raise DataError(
            f"The output folder {out} is not empty and not a FreeScale data set",
            next_step="name another folder; nothing in it was touched",
        )
    if not overwrite:
        raise DataError(
            f"The output folder {out} already holds a data set",
            next_step="name another folder, or ask to overwrite it",
        )


def _publish(work: Path, out: Path) -> None:
    """Give the finished folder its name; under that name there is never half a data set."""
    if not out.exists():
        work.rename(out)
        return
    old = work.with_name(f"{work.name}-old")
    out.rename(old)
    try:
        work.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _io_problem(error: OSError, out: Path) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DataError(
            f"No space left on the disk of {out}",
            got=str(error),
            next_step="free some space (about three times the input), or name a folder on another disk",
        )
    return DataError(
        "The data set could not be written",
        got=str(error),
        next_step=f"check the rights of the input and {out}",
    )


# ---- which format, which files, which columns ----


def _detect(source: Path, separator: str | None) -> tuple[str, str]:
    """The format and the reason, from the name and then from the first lines."""
    if source.is_dir():
        for kind in ("parquet", "csv"):
            if _files_of(source, kind):
                return kind, f"the folder holds {kind} files"
        raise _undecided(source, "a folder without csv or parquet files")
    suffix = _suffix(source)
    if suffix in (".parquet", ".pq"):
        return "parquet", f"the name ends in {suffix}"
    if suffix in (".inter", ".csv", ".tsv"):
        return ("inter" if suffix == ".inter" else "csv"), f"the name ends in {suffix}"
    with source.open("rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet", "it starts like a Parquet file"
    head = next((chunk.data for chunk in _chunks(source, 1 << 16, quoted=False)), b"")
    lines = [line.strip() for line in head.splitlines() if line.strip()][:100]
    if not lines:
        raise _empty(source)
    return _detect_lines(source, lines, separator)


def _detect_lines(source: Path, lines: list[bytes], separator: str | None) -> tuple[str, str]:
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
    elif _sniff_separator(lines[0].decode("utf-8", "replace")) and re.match(rb"['\"]?[A-Za-z_]", lines[0]):
        return "csv", "the first line is a header"
    raise _undecided(source, repr(_shown(lines[0])))


def _empty(source: Path) -> DataError:
    return DataError(f"{source} is empty", next_step="check the path of the raw interactions")


def _undecided(source: Path, got: str) -> DataError:
    return DataError(
        f"Cannot tell the format of {source}",
        got=got,
        allowed=", ".join(FORMATS[1:]),
        next_step="name the format; csv needs a first line that names the columns",
    )


def _suffix(path: Path) -> str:
    """The extension in lower case, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _CODECS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _files_of(source: Path, kind: str) -> list[Path]:
    if not source.is_dir():
        return [source]
    suffixes = {"parquet": (".parquet", ".pq"), "csv": (".csv", ".tsv")}.get(kind, ())
    files = (path for path in source.iterdir() if path.is_file() and path.name[0] not in "._")
    return sorted(path for path in files if _suffix(path) in suffixes)


def _sniff_separator(header: str) -> str | None:
    best = max((",", "\t", ";", "|"), key=header.count)
    return best if best in header else None


def _choose_columns(path: Path, header: list[str], columns: ColumnNames) -> dict[str, int]:
    """Where in the header each part is; times and actions are optional unless named."""
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in header]
    chosen: dict[str, int] = {}
    for role, guesses in _GUESSES.items():
        wanted: str | None = getattr(columns, role)
        if wanted:
            if wanted not in header:
                raise _no_column(path, role, wanted, header)
            chosen[role] = header.index(wanted)
        elif wanted is None and (found := [plain.index(guess) for guess in guesses if guess in plain]):
            chosen[role] = found[0]
        elif role in ("user", "item"):
            raise _no_column(path, role, None, header)
    if len(set(chosen.values())) < len(chosen):
        raise DataError(
            f"One column of {path} cannot play two parts",
            got=", ".join(f"{role}: {header[place]!r}" for role, place in chosen.items()),
            allowed=f"the columns there are: {_shown(', '.join(header))}",
        )
    return chosen


def _no_column(path: Path, role: str, wanted: str | None, header: list[str]) -> DataError:
    guess = nearest(wanted or role, header)
    return DataError(
        f"{path} has no column for the {role}",
        got=repr(wanted) if wanted else f"none of the usual names ({', '.join(_GUESSES[role])})",
        allowed=f"the columns there are: {_shown(', '.join(header))}",
        next_step=f"name the {role} column" + (f"; did you mean {guess!r}?" if guess else ""),
    )


def _shown(text: str | bytes, limit: int = 100) -> str:
    """Text for an error message: printable and short."""
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode("utf-8", "replace")
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "..."


# ---- reading raw input ----


def _read_all(
    source: Path, kind: str, columns: ColumnNames, separator: str | None, memory: int
) -> Iterator[tuple[Events, float]]:
    """All events in input order, with the fraction of the input that has been read."""
    files = _files_of(source, kind)
    if not files:
        raise DataError(f"{source} holds no {kind} files", allowed="for a folder: csv or parquet files")
    size = sum(path.stat().st_size for path in files)
    if not size:
        raise _empty(source)
    done = num_events = 0
    features: list[str] | None = None
    for path in files:
        for events, consumed in _read_file(path, kind, columns, separator, memory):
            found = [name for name in FEATURE_DTYPES if name in events]
            features = features or found
            if found != features:
                raise DataError(f"{path} has other columns than {files[0]}", got=found, allowed=features)
            num_events += len(events["user"])
            yield events, min(1.0, (done + consumed) / size)
        done += path.stat().st_size
    if not num_events:
        raise DataError(
            f"{source} has no events, at most a header",
            next_step="check the path of the raw interactions",
        )


def _read_file(
    path: Path, kind: str, columns: ColumnNames, separator: str | None, memory: int
) -> Iterator[tuple[Events, int]]:
    chunk_bytes = max(64, min(_MAX_CHUNK_BYTES, memory // 64))
    if kind == "parquet":
        return _read_parquet(path, columns, max(64, memory // 1024))
    if kind == "sequences":
        return _read_sequences(path, separator, chunk_bytes)
    return _read_delimited(path, kind, columns, separator, chunk_bytes)


class _Chunk(NamedTuple):
    """Whole lines of a text file."""

    path: Path
    data: bytes
    first_line: int
    consumed: int

    def line(self, record: int, *, quoted: bool = False) -> int:
        """Number in the file of the line that holds the record-th record of this chunk."""
        inside_quotes = False
        for number, line in enumerate(self.data.split(b"\n")):
            if line.strip() and not inside_quotes:
                if record == 0:
                    return self.first_line + number
                record -= 1
            inside_quotes ^= quoted and line.count(b'"') % 2 == 1
        return self.first_line

    def place(self, line: int) -> tuple[str, str]:
        """That line for an error message: where it is, and its text."""
        text = self.data.split(b"\n")[line - self.first_line].rstrip(b"\r")
        return f"{self.path}, line {line}", repr(_shown(text))


_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def _chunks(path: Path, size: int, *, quoted: bool) -> Iterator[_Chunk]:
    """The file in pieces of about `size` bytes, cut where a line ends (and no quoted field is open)."""
    first_line, rest = 1, b""
    codec = _CODECS.get(path.suffix.lower())
    try:
        with path.open("rb") as raw:
            stream = pa.CompressedInputStream(raw, codec) if codec else raw
            while block := stream.read(max(size, len(rest))):
                data = rest + block
                if first_line == 1:
                    data = data.removeprefix(b"\xef\xbb\xbf")
                _check_text(path, data)
                cut = _last_line_end(data, quoted=quoted)
                if cut:
                    yield _Chunk(path, data[:cut], first_line, raw.tell())
                    first_line += data.count(b"\n", 0, cut)
                rest = data[cut:]
            if rest.strip():
                yield _Chunk(path, rest + b"\n", first_line, raw.tell())
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read", got=str(error), next_step="check the file") from error


def _check_text(path: Path, data: bytes) -> None:
    if b"\0" in data:
        raise DataError(
            f"{path} is not text: it has zero bytes",
            got=repr(data[:16]),
            allowed="text in UTF-8 or ASCII, or Parquet",
            next_step="unpack or convert the file first, or ask for format parquet",
        )
    if len(data) > _MAX_LINE_BYTES:
        raise DataError(
            f"{path} has a line of more than {_MAX_LINE_BYTES >> 20} MiB",
            got=repr(_shown(data)),
            next_step="check that lines end in a newline and that quotes are closed",
        )


def _last_line_end(data: bytes, *, quoted: bool) -> int:
    cut = data.rfind(b"\n") + 1
    while quoted and cut and data.count(b'"', 0, cut) % 2:
        cut = data.rfind(b"\n", 0, cut - 1) + 1
    return cut


_PARSE_BYTES = 4 << 20
_CSV_TYPES = {"user": pa.int64(), "item": pa.int64(), "time": pa.int64(), "action": pa.float64()}


@dataclass(frozen=True)
class _Layout:
    """How the lines of a delimited text file are laid out."""

    fields: tuple[str, ...]
    roles: tuple[str, ...]
    separator: str
    quoted: bool

    def parse(self, data: bytes, *, as_text: bool) -> dict[str, Any]:
        """The columns that play a part; as text it is slow, but cannot fail on a value."""
        bad_rows: list[Any] = []
        if as_text:
            # Other encodings may stand in columns that do not matter, or in a bad line that is to be shown.
            data = data.decode("utf-8", "replace").encode()

        def skip(row: Any) -> str:
            bad_rows.append(row)
            return "skip"

        table = pyarrow.csv.read_csv(
            pa.BufferReader(data),
            read_options=pyarrow.csv.ReadOptions(
                column_names=self.fields,
                use_threads=not as_text,
                block_size=len(data) if as_text else _PARSE_BYTES,
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=self.separator,
                quote_char='"' if self.quoted else False,
                newlines_in_values=self.quoted and b'"' in data,
                invalid_row_handler=skip if as_text else None,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=self.roles,
                column_types={role: pa.string() if as_text else _CSV_TYPES[role] for role in self.roles},
                null_values=[],
                check_utf8=False,
            ),
        )
        if bad_rows:
            raise _FieldCountError(bad_rows[0].number - 1, bad_rows[0].actual_columns)
        return {role: table[role].combine_chunks() for role in self.roles}


class _FieldCountError(Exception):
    """A line with the wrong number of fields."""

    def __init__(self, record: int, num_fields: int) -> None:
        super().__init__(record, num_fields)
        self.record = record
        self.num_fields = num_fields


def _read_delimited(
    path: Path, kind: str, columns: ColumnNames, separator: str | None, chunk_bytes: int
) -> Iterator[tuple[Events, int]]:
    """Events of text with one event a line."""
    layout: _Layout | None = None
    as_text = False
    for chunk in _chunks(path, chunk_bytes, quoted=kind == "csv"):
        if layout is None:
            header, _, body = chunk.data.partition(b"\n")
            layout = _layout_of(path, kind, header.decode("utf-8", "replace"), columns, separator)
            if kind in ("inter", "csv"):
                chunk = chunk._replace(data=body, first_line=chunk.first_line + 1)
        data = _plain(chunk.data, kind, separator)
        if not data.strip():
            continue
        if not as_text:
            try:
                yield _convert(layout.parse(data, as_text=False), None), chunk.consumed
                continue
            except ValueError:
                # Fractional times, or something wrong: read text, which serves both. Times stay so.
                as_text = True
        yield _convert_text(layout, chunk, data), chunk.consumed


def _layout_of(path: Path, kind: str, header: str, columns: ColumnNames, separator: str | None) -> _Layout:
    quoted = False
    if kind == "movielens":
        names, mark = ["user", "item", "action", "time"], "\x1f"
    elif kind == "pairs":
        names, mark = ["user", "item"], " "
    elif kind == "inter":
        names, mark = [name.split(":")[0].strip() for name in header.split("\t")], "\t"
    else:
        mark, quoted = separator or _sniff_separator(header) or ",", True
        # Lone carriage returns, old line ends that are not read here, would stop the reader.
        fields_of = csv.reader([header.replace("\r", " ")], delimiter=mark)
        names = [name.strip() for name in next(fields_of, [])]
    chosen = _choose_columns(path, names, columns)
    fields = [f"field {number}" for number in range(len(names))]
    for role, place in chosen.items():
        fields[place] = role
    return _Layout(tuple(fields), tuple(chosen), mark, quoted)


def _plain(data: bytes, kind: str, separator: str | None) -> bytes:
    """The same lines with a separator of one character, which the fast parser needs."""
    if kind == "movielens":
        return data.replace(b"::", b"\x1f")
    if kind in ("csv", "inter"):
        return data
    for mark in (separator or "\t", "\t", "\r"):
        data = data.replace(mark.encode(), b" ")
    while b"  " in data:
        data = data.replace(b"  ", b" ")
    return data.replace(b" \n", b"\n").replace(b"\n ", b"\n").lstrip(b" ")


def _convert_text(layout: _Layout, chunk: _Chunk, data: bytes) -> Events:
    try:
        raw = layout.parse(data, as_text=True)
    except _FieldCountError as bad:
        where, text = chunk.place(chunk.line(bad.record, quoted=layout.quoted))
        raise DataError(
            f"{where}: wrong number of fields",
            got=f"{bad.num_fields} in {text}",
            allowed=f"{len(layout.fields)}",
            next_step="correct the line, or name the right format and separator",
        ) from None
    except pa.ArrowInvalid as error:
        where = chunk.place(chunk.first_line)[0]
        raise DataError(f"{where} or below cannot be parsed", got=str(error)) from error
    return _convert(raw, lambda record: chunk.place(chunk.line(record, quoted=layout.quoted)))


def _read_sequences(path: Path, separator: str | None, chunk_bytes: int) -> Iterator[tuple[Events, int]]:
    """Events of text with one user a line: the user, then the items in order."""
    layout = _Layout(("item",), ("item",), "\x1f", quoted=False)
    for chunk in _chunks(path, chunk_bytes, quoted=False):
        data = _plain(chunk.data, "sequences", separator)
        if not data.strip():
            continue
        counts = _tokens_per_line(data)
        # One number a line is the fastest thing to parse; the counts put the lines together again.
        one_a_line = data.replace(b" ", b"\n")
        try:
            numbers = _convert(layout.parse(one_a_line, as_text=False), None)["item"]
        except ValueError:
            tokens = [token.decode("utf-8", "replace") for token in one_a_line.split(b"\n") if token]
            numbers = _convert({"item": pa.array(tokens)}, _line_finder(chunk, np.cumsum(counts)))["item"]
        counts = counts[counts > 0]
        is_user = np.zeros(len(numbers), dtype=bool)
        is_user[np.cumsum(counts) - counts] = True
        yield {"user": np.repeat(numbers[is_user], counts - 1), "item": numbers[~is_user]}, chunk.consumed


def _line_finder(chunk: _Chunk, ends: IntArray) -> Locate:
    return lambda token: chunk.place(chunk.first_line + int(np.searchsorted(ends, token, side="right")))


def _tokens_per_line(data: bytes) -> IntArray:
    """Numbers of blank-separated tokens of lines without superfluous blanks."""
    letters = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    spaces = np.searchsorted(np.flatnonzero(letters == ord(" ")), ends)
    counts = np.diff(spaces, prepend=0) + 1
    counts[np.diff(ends, prepend=-1) == 1] = 0
    return counts


def _read_parquet(path: Path, columns: ColumnNames, batch_events: int) -> Iterator[tuple[Events, int]]:
    """Events of a Parquet file with one event a row, or with one user a row and lists."""
    size, done = path.stat().st_size, 0
    try:
        # Buffered streams keep huge row groups, which other writers make, out of memory.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            chosen = {role: names[place] for role, place in _choose_columns(path, names, columns).items()}
            num_rows = max(1, file.metadata.num_rows)
            batch_rows = max(1, batch_events * num_rows // _num_values(file.metadata, chosen["item"]))
            for batch in file.iter_batches(batch_rows, columns=list(chosen.values()), use_threads=False):
                raw = {role: batch.column(name) for role, name in chosen.items()}
                yield _convert_rows(path, raw, done), size * done // num_rows
                done += batch.num_rows
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: it is cut off, damaged or something else",
            got=_shown(str(error), 200),
            next_step="write or copy the file again",
        ) from error


def _num_values(metadata: Any, name: str) -> int:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    leaves = [group.column(number) for group in groups for number in range(group.num_columns)]
    return max(1, sum(leaf.num_values for leaf in leaves if leaf.path_in_schema.split(".")[0] == name))


def _convert_rows(path: Path, raw: dict[str, Any], first_row: int) -> Events:
    """Rows of one event as they are; rows of lists laid end to end."""
    listed = [role for role, column in raw.items() if _is_list(column.type)]
    if not listed:
        return _convert(raw, lambda row: (f"{path}, row {first_row + row}", "that row"))
    if sorted(listed) != sorted(set(raw) - {"user"}):
        raise DataError(
            f"{path} mixes lists and single values",
            got=f"lists in {', '.join(listed)}",
            allowed="one event a row, or one user a row and a list in every other column",
        )
    counts = _list_lengths(raw["item"])
    for role in listed:
        others = _list_lengths(raw[role])
        if (others != counts).any():
            row = int(np.flatnonzero(others != counts)[0])
            raise DataError(
                f"{path}, row {first_row + row}: lists of different lengths",
                got=f"{counts[row]} in item, {others[row]} in {role}",
                allowed="as many of each as there are events",
            )
    ends = np.cumsum(counts)
    flat = {"user": raw["user"].take(pa.array(np.repeat(np.arange(len(counts)), counts)))}
    flat.update({role: raw[role].flatten() for role in listed})
    return _convert(
        flat, lambda event: (f"{path}, row {first_row + np.searchsorted(ends, event, 'right')}", "a list")
    )


def _is_list(kind: Any) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _list_lengths(lists: Any) -> IntArray:
    return pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


# ---- values ----


def _convert(raw: dict[str, Any], locate: Locate | None) -> Events:
    """Checked numbers of every column; without `locate` a bad value is a plain ValueError."""
    events: Events = {}
    for role, column in raw.items():
        try:
            events.update(_numbers(role, column))
        except (ValueError, pa.ArrowException):
            if locate is None:
                raise
            raise _bad_value(role, column, locate) from None
    return events


def _bad_value(role: str, column: Any, locate: Locate) -> DataError:
    """The error of the first bad value, found by halving."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            _numbers(role, column.slice(low, middle - low))
            low = middle
        except (ValueError, pa.ArrowException):
            high = middle
    value = repr(_shown(str(column[low]))) if column[low].is_valid else "nothing"
    where, text = locate(low)
    return DataError(
        f"{where}: the {role} is not one of the numbers allowed",
        got=f"{value} in {text}",
        allowed=_ALLOWED[role],
        next_step=_REMEDY[role],
    )


def _numbers(role: str, column: Any) -> Events:
    """The column as numbers of its role, or a ValueError."""
    if column.null_count:
        raise ValueError("missing value")
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.utf8_trim_whitespace(column)
    if role == "time":
        return _times(column)
    if role == "action":
        exact = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):
            actions = exact.astype(np.float32)
        if not np.isfinite(actions).all():
            raise ValueError("not finite")
        return {"action": actions}
    ids = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    if len(ids) and ids.min() < 0:
        raise ValueError("negative")
    return {role: ids}


def _times(column: Any) -> Events:
    """Whole times (dates in the unit of the column), and what rounding took away if that is not nothing.

    Whole numbers never go through a float, which would merge times in nanoseconds.
    """
    kind = column.type
    if pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        return {"time": column.cast(pa.int64()).to_numpy(zero_copy_only=False)}
    whole: Any = 0
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        is_whole = pc.match_substring_regex(column, r"^-?\d+$")
        whole = pc.if_else(is_whole, column, "0").cast(pa.int64()).to_numpy(zero_copy_only=False)
        column = pc.if_else(is_whole, "0", column)
    exact = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    if not (np.abs(exact) < 2.0**63).all():
        raise ValueError("not finite or too large")
    rounded = np.rint(exact)
    times: Events = {"time": whole + rounded.astype(np.int64)}
    if (exact != rounded).any():
        times["fraction"] = exact - rounded
    return times


# ---- sorting in bounded memory ----


class _Run(NamedTuple):
    """Sorted events on disk, in batches whose first and last users are known."""

    path: Path
    first_users: IntArray
    last_users: IntArray

    def read(self, low: int, high: int) -> Events | None:
        """The events of users from low to high, both included."""
        start = int(np.searchsorted(self.last_users, low, side="left"))
        stop = int(np.searchsorted(self.first_users, high, side="right"))
        if start >= stop:
            return None
        # Read, not memory mapped: mapped pages would count as memory of this process.
        with pa.OSFile(str(self.path)) as file, pa.ipc.open_file(file) as reader:
            table = pa.Table.from_batches([reader.get_batch(number) for number in range(start, stop)])
        events = {name: table[name].to_numpy() for name in table.column_names}
        first = np.searchsorted(events["user"], low, side="left")
        last = np.searchsorted(events["user"], high, side="right")
        return {name: column[first:last] for name, column in events.items()}


class _EventSorter:
    """Takes events in input order, gives them back by user, then time, then input order."""

    def __init__(self, folder: Path, memory: int) -> None:
        self.features: tuple[str, ...] = ()
        self._folder = folder
        self._memory = memory
        self._pending: list[Events] = []
        self._num_pending = 0
        self._run_events = 0
        self._runs: list[_Run] = []

    def add(self, events: Events) -> None:
        """Take some more events; those that no longer fit go to disk."""
        if not self._run_events:
            self.features = tuple(name for name in FEATURE_DTYPES if name in events)
            # At the peak an event is there three times (as read, put together, sorted), with key, order and
            # working memory of the sort, and once more in the Parquet writer.
            row_bytes = sum(column.itemsize for column in events.values())
            self._run_events = max(4, self._memory // (6 * row_bytes + 24))
        self._pending.append(events)
        self._num_pending += len(events["user"])
        if self._num_pending >= self._run_events:
            self._spill()

    def _spill(self) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"run-{len(self._runs):06d}.arrow"
        self._runs.append(_write_run(path, self._take_pending(), max(1, self._run_events // _RUN_BATCHES)))

    def _take_pending(self) -> Events:
        parts, self._pending, self._num_pending = self._pending, [], 0
        return _sort(_concat(parts))

    def blocks(self) -> Iterator[tuple[Events, float]]:
        """All events in order, cut between users into blocks that fit, with the fraction given so far."""
        if not self._runs:
            yield self._take_pending(), 1.0
            return
        if self._num_pending:
            self._spill()
        lows, highs = self._ranges()
        for number, (low, high) in enumerate(zip(lows.tolist(), highs.tolist())):
            parts = [part for run in self._runs if (part := run.read(low, high))]
            if parts:
                yield _sort(_concat(parts)), (number + 1) / len(lows)

    def _ranges(self) -> tuple[IntArray, IntArray]:
        """Ranges of users that hold about one run's worth of events each."""
        # One batch is a small part of a run, and each run may add one that straddles the border of a range.
        step = max(_RUN_BATCHES // 8, _RUN_BATCHES - len(self._runs), 1)
        starts = np.sort(np.concatenate([run.first_users for run in self._runs]))
        lows = np.unique(np.append(starts[step::step], 0))
        return lows, np.append(lows[1:] - 1, _MAX_INT64)


def _write_run(path: Path, events: Events, batch_rows: int) -> _Run:
    batch = pa.record_batch(events)
    starts = np.arange(0, batch.num_rows, batch_rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        for start in starts.tolist():
            writer.write_batch(batch.slice(start, batch_rows))
    users = events["user"]
    return _Run(path, users[starts], users[np.append(starts[1:], len(users)) - 1])


def _concat(parts: list[Events]) -> Events:
    """One after another; parts without fractions have zeros there."""
    names = max(parts, key=len)
    return {
        name: np.concatenate([p[name] if name in p else np.zeros(len(p["user"])) for p in parts])
        for name in names
    }


def _sort(events: Events) -> Events:
    """By user, then time; equal ones keep their order."""
    order = _order(events["user"], events.get("time"), events.get("fraction"))
    return events if order is None else {name: column[order] for name, column in events.items()}


def _order(user: IntArray, time: IntArray | None, fraction: npt.NDArray[Any] | None) -> IntArray | None:
    """The stable order, or None where the events are in order already."""
    key = user
    if time is not None:
        first_user, first_time = int(user.min()), int(time.min())
        time_span = int(time.max()) - first_time + 1
        if fraction is not None or time_span * (int(user.max()) - first_user + 1) > _MAX_INT64:
            return np.lexsort((time, user) if fraction is None else (fraction, time, user))
        # One key of both sorts three times as fast as two keys, and twenty times on runs already sorted.
        key = (user - first_user) * time_span + (time - first_time)
    return None if (key[1:] >= key[:-1]).all() else np.argsort(key, kind="stable")


# ---- writing ----


class _ItemCounts:
    """How often each item occurs, over all events and over those to train on."""

    def __init__(self) -> None:
        self._parts: list[tuple[IntArray, IntArray, IntArray]] = []
        self._num_parts = 0
        self._num_merged = 0

    def add(self, items: IntArray, lengths: IntArray) -> None:
        """Count the items of whole histories; the last two events of each are not to train on."""
        train = np.ones(len(items), dtype=bool)
        ends = np.cumsum(lengths)
        train[ends - 1] = False
        train[ends[lengths >= 2] - 2] = False
        if items.max() < 8 * len(items):
            counts = np.bincount(items)
            ids = np.flatnonzero(counts)
            counts, train_counts = counts[ids], np.bincount(items[train], minlength=len(counts))[ids]
        else:
            ids, inverse, counts = np.unique(items, return_inverse=True, return_counts=True)
            train_counts = np.bincount(inverse[train], minlength=len(ids))
        self._parts.append((ids, counts, train_counts))
        self._num_parts += len(ids)
        if self._num_parts > 2 * self._num_merged + (1 << 20):
            self.merged()

    def merged(self) -> tuple[IntArray, IntArray, IntArray]:
        """Ids ascending, counts, counts to train on."""
        ids, counts, train_counts = (np.concatenate(arrays) for arrays in zip(*self._parts))
        unique, inverse = np.unique(ids, return_inverse=True)
        sums = [np.zeros(len(unique), dtype=np.int64) for _ in range(2)]
        np.add.at(sums[0], inverse, counts)
        np.add.at(sums[1], inverse, train_counts)
        self._parts = [(unique, sums[0], sums[1])]
        self._num_parts = self._num_merged = len(unique)
        return self._parts[0]


class _DatasetWriter:
    """Writes histories, in the order they come, as the files of a data set."""

    def __init__(self, folder: Path, features: tuple[str, ...], min_events: int) -> None:
        self._folder = folder
        self._features = features
        self._min_events = min_events
        self._dropped_users = 0
        self._lengths: list[IntArray] = []
        self._items = _ItemCounts()
        self._rest: Events = {}
        self._rest_lengths = np.zeros(0, dtype=np.int64)
        self._shards: list[dict[str, Any]] = []
        self._sink: Any = None
        self._writer: Any = None
        lists = [(name, pa.list_(pa.from_numpy_dtype(FEATURE_DTYPES[name]))) for name in features]
        self._schema = pa.schema([("user", pa.int64()), *lists])

    def add(self, events: Events) -> None:
        """Take the sorted events of whole users."""
        starts = np.flatnonzero(np.diff(events["user"], prepend=-1))
        lengths = np.diff(starts, append=len(events["user"]))
        keep = lengths >= self._min_events
        self._dropped_users += int((~keep).sum())
        kept = np.repeat(keep, lengths)
        names = ("user", *self._features)
        events = {name: events[name] if keep.all() else events[name][kept] for name in names}
        lengths = lengths[keep]
        if not len(lengths):
            return
        self._lengths.append(lengths)
        self._items.add(events["item"], lengths)
        # What is left of the last block comes first, so that row groups do not depend on the blocks.
        self._rest = _concat([self._rest, events]) if self._rest else events
        self._rest_lengths = np.concatenate([self._rest_lengths, lengths])
        self._write_groups(final=False)

    def _write_groups(self, *, final: bool) -> None:
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._rest_lengths)])
        num_users, start = len(self._rest_lengths), 0
        while start < num_users:
            fits = int(np.searchsorted(offsets, offsets[start] + _ROW_GROUP_EVENTS, side="right")) - 1
            stop = max(start + 1, min(start + _ROW_GROUP_USERS, fits))
            if stop == num_users and stop - start < _ROW_GROUP_USERS and not final:
                break
            self._write_group(offsets[start : stop + 1])
            start = stop
        # Copies, so that the block they are cut from can go.
        self._rest = {name: column[offsets[start] :].copy() for name, column in self._rest.items()}
        self._rest_lengths = self._rest_lengths[start:].copy()

    def _write_group(self, offsets: IntArray) -> None:
        if self._writer is None:
            self._open_shard()
        first, last = offsets[0], offsets[-1]
        local = pa.array((offsets - first).astype(np.int32))
        lists = [pa.ListArray.from_arrays(local, self._rest[name][first:last]) for name in self._features]
        table = pa.table([pa.array(self._rest["user"][offsets[:-1]]), *lists], schema=self._schema)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._shards[-1]["row_groups"].append(table.num_rows)
        if self._sink.tell() >= _SHARD_BYTES:
            self._close_shard()

    def _open_shard(self) -> None:
        name = f"shard-{len(self._shards):05d}.parquet"
        self._shards.append({"file": name, "bytes": 0, "row_groups": []})
        self._sink = pa.OSFile(str(self._folder / name), "wb")
        # Times rise within a history: as deltas they are written twice as fast and take a quarter less space.
        deltas = {"time.list.element": "DELTA_BINARY_PACKED"} if "time" in self._features else None
        self._writer = pq.ParquetWriter(
            self._sink,
            self._schema,
            compression="zstd",
            use_dictionary=[f"{name}.list.element" for name in self._features if name != "time"],
            column_encoding=deltas,
            write_statistics=False,
            write_page_checksum=True,
        )

    def _close_shard(self) -> None:
        writer, self._writer = self._writer, None
        try:
            writer.close()
        finally:
            self._sink.close()
        shard = self._shards[-1]
        shard["bytes"] = (self._folder / shard["file"]).stat().st_size

    def abort(self) -> None:
        """Let go of a shard that an error left open; it will be deleted."""
        with contextlib.suppress(OSError, pa.ArrowException):
            if self._writer is not None:
                self._close_shard()
            elif self._sink is not None:
                self._sink.close()

    def finish(self, name: str, source_format: str) -> dict[str, Any]:
        """Write the rest, the indexes and, last, the manifest, which is returned."""
        if not self._lengths:
            raise DataError(
                f"No user has {self._min_events} events or more",
                got=f"{self._dropped_users} users with fewer",
                next_step="give more data, or lower min_events",
            )
        self._write_groups(final=True)
        if self._writer is not None:
            self._close_shard()
        lengths = np.concatenate(self._lengths)
        np.save(self._folder / LENGTHS_FILE, lengths, allow_pickle=False)
        ids, counts, train_counts = self._items.merged()
        catalog = pa.table({"item": ids, "count": counts, "train_count": train_counts})
        pq.write_table(catalog, self._folder / ITEMS_FILE, compression="zstd")
        manifest = {
            "format": DATASET_FORMAT,
            "version": DATASET_VERSION,
            "name": name,
            "source_format": source_format,
            "num_users": len(lengths),
            "num_events": int(lengths.sum()),
            "num_items": len(ids),
            "max_item": int(ids[-1]),
            "features": list(self._features),
            "dropped_users": self._dropped_users,
            "shards": self._shards,
        }
        (self._folder / DATASET_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        return manifest
