"""Raw input as a whole: which format it has, which files, and the events of all of them in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from freescale.data.excerpt import excerpt
from freescale.data.preparing.reading.event_columns import Events, features_of
from freescale.data.preparing.reading.input_files import files_of, other_files, partition_of
from freescale.data.preparing.reading.raw_format import RawFormat, RawSample, Reading, checked_chunks
from freescale.data.stored.manifest import DATASET_FILE, is_dataset, was_dataset
from freescale.errors import DataError, nearest
from freescale.registry import OUTSIDE, find, names

AUTO = "auto"
# Who is asked first what a file is, among the formats that ship: a guess from the shape of lines comes after what
# cannot be mistaken. Whoever is not in this list is asked last.
_ASKED = ("parquet", "jsonl", "movielens", "inter", "pairs", "sequences", "csv")


def format_names() -> list[str]:
    """What `format` can be: "auto", the formats that ship in the order they are asked in, those from outside."""
    shipped, outside = _formats()
    return [AUTO, *shipped, *outside]


def check_format(name: str) -> None:
    """Refuse a name that is none."""
    known = format_names()
    if name not in known:
        guess = nearest(name, known)
        raise DataError(
            "Unknown input format",
            got=name,
            allowed=", ".join(known),
            next_step=f"did you mean {guess!r}? {OUTSIDE}" if guess else OUTSIDE,
        )


def check_input(source: Path, owner: str | None = None) -> None:
    """There must be something to read, and it must be raw; `owner` is whose file it is if not of events."""
    if not source.exists():
        raise _nothing(f"There is no input {source}", owner)
    if is_dataset(source):
        raise DataError(f"{source} is already a FreeScale data set", next_step="train on it with data.path")
    if was_dataset(source):
        raise DataError(
            f"{source} is a FreeScale data set whose {DATASET_FILE} is missing or damaged",
            next_step="prepare it again from the raw data",
        )


def find_format(
    source: Path,
    separator: str | None = None,
    header: tuple[str, ...] | None = None,
    *,
    owner: str | None = None,
) -> tuple[str, str]:
    """The format and the reason; `owner` is whose file it is if not of events.

    Formats from outside are asked first, in the order of their names: they are there because the user asked for
    them. Then those that ship. Of both, all may claim the file by the end of its name before any looks into it.
    """
    if header is not None:
        return "csv", "the names of its columns were given"
    shipped, outside = _formats()
    sample = RawSample(source, separator)
    for asked in (outside, shipped):
        formats = {name: _format(name) for name in asked}
        found = _claimed(source, formats) if source.is_dir() else _recognised(sample, formats)
        if found is not None:
            return found
    if source.is_dir():
        raise _undecided(source, "a folder without csv, jsonl or parquet files")
    lines = sample.read_lines()
    if not lines:
        raise _nothing(f"{source} is empty", owner)
    raise _undecided(source, repr(excerpt(lines[0])))


def read_events(source: Path, name: str, reading: Reading) -> Iterator[tuple[Events, float]]:
    """All events in input order, with the fraction of the input that has been read."""
    raw_format = _format(name)
    files = files_of(source, raw_format)
    if not files:
        raise DataError(
            f"{source} holds no {name} files",
            allowed="for a folder: csv, jsonl or parquet files",
            next_step="name the folder of the files, or the format (`--format`)",
        )
    size = sum(path.stat().st_size for path in files)
    if not size:
        raise _nothing(f"{source} is empty", reading.owner)
    done = 0
    features: list[str] | None = None
    for path in files:
        own = replace(reading, partition=partition_of(source, path))
        for events, consumed in _chunks(name, raw_format, path, own):
            found = list(features_of(events))
            _check_features(name, path, reading, events)
            features = features or found
            if found != features:
                raise DataError(
                    f"{path} has other columns than {files[0]}",
                    got=", ".join(found),
                    allowed=", ".join(features),
                    next_step="give all files the same columns, or leave one out (`--time ''`, `--action ''`)",
                )
            yield events, min(1.0, (done + consumed) / size)
        done += path.stat().st_size
    if not reading.values.num_events:
        raise _no_events(source, reading)


def _check_features(name: str, path: Path, reading: Reading, events: Events) -> None:
    """A format that has no columns has no features."""
    missing = [each for each in reading.values.features.features if each not in events]
    if missing:
        raise DataError(
            f"{path} has no features",
            got=f"{name}, and the schema names {', '.join(missing)}",
            allowed="formats with named columns: csv, jsonl, inter, parquet",
            next_step="leave these features out of the schema, or give the data in another format",
        )


def files_not_read(source: Path, name: str) -> list[str]:
    """Names of files of a folder that are of another format than the one that is read."""
    return [str(path.relative_to(source)) for path in other_files(source, _format(name))]


def _no_events(source: Path, reading: Reading) -> DataError:
    bad, rows = reading.values.bad_lines, f"{reading.owner or 'event'}s"
    if not bad.num_skipped:
        return _nothing(f"{source} has no {rows}, at most a header", reading.owner)
    first = bad.examples[0]
    return DataError(
        f"{source} has no {rows}: all {bad.num_skipped:,} lines cannot be used",
        got=f"{first.what} ({first.got})",
        allowed=first.allowed,
        next_step=first.next_step,
    )


def _formats() -> tuple[list[str], list[str]]:
    """Names of the formats that ship, in the order they are asked in, and of those from outside."""
    known = names("format")
    shipped = [name for name in known if find("format", name).ships]
    last = len(_ASKED)
    shipped.sort(key=lambda name: _ASKED.index(name) if name in _ASKED else last)
    return shipped, [name for name in known if name not in shipped]


def _format(name: str) -> RawFormat:
    """The format of this name, made; one from outside must have all that a format has."""
    made = find("format", name).make()
    if not isinstance(made, RawFormat):
        needed = ("suffixes", "in_folders", "recognises", "chunks")
        raise DataError(
            f"Format {name!r} is not complete",
            got="without " + ", ".join(member for member in needed if not hasattr(made, member)),
            allowed=", ".join(needed),
            next_step="see `RawFormat` in freescale/data/preparing/reading/raw_format.py",
        )
    return made


def _claimed(folder: Path, formats: dict[str, RawFormat]) -> tuple[str, str] | None:
    held = {name: found for name, raw_format in formats.items() if (found := files_of(folder, raw_format))}
    if len(held) > 1:
        raise DataError(
            f"{folder} holds files of several formats",
            got=", ".join(f"{len(found)} {name} such as {found[0].name}" for name, found in held.items()),
            next_step=f"say which to read, such as `--format {next(iter(held))}`",
        )
    return next(((name, f"the folder holds {name} files") for name in held), None)


def _recognised(sample: RawSample, formats: dict[str, RawFormat]) -> tuple[str, str] | None:
    for name, raw_format in formats.items():
        if sample.suffix in raw_format.suffixes:
            return name, f"the name ends in {sample.suffix}"
    for name, raw_format in formats.items():
        reason = raw_format.recognises(sample)
        if reason:
            return name, reason
    return None


def _chunks(name: str, raw_format: RawFormat, path: Path, reading: Reading) -> Iterator[tuple[Events, int]]:
    if find("format", name).ships:
        return raw_format.chunks(path, reading)
    return checked_chunks(name, raw_format, path, reading)


def _nothing(what: str, owner: str | None) -> DataError:
    path = f"the file of {owner}s (`--{owner}s`)" if owner else "the raw interactions"
    return DataError(what, next_step=f"check the path of {path}")


def _undecided(source: Path, got: str) -> DataError:
    return DataError(
        f"Cannot tell the format of {source}",
        got=got,
        allowed=", ".join(format_names()[1:]),
        next_step="name the format (`--format`); without a first line that names the columns, "
        "name them in their order, such as `--columns user,item,time,action`",
    )
