"""The files of an input: one, or all of a folder with its folders, whose names may be columns (`dt=2024-01-31`)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from freescale.data.preparing.reading.raw_format import RawFormat, RawSample

_NOTHING = "__HIVE_DEFAULT_PARTITION__"


def files_of(source: Path, raw_format: RawFormat) -> list[Path]:
    """The file itself; of a folder all files of this format, those of folders inside too, by their paths.

    What begins with a dot or an underscore is left alone: writers put their own notes there.
    """
    if not source.is_dir():
        return [source]
    suffixes = raw_format.suffixes if raw_format.in_folders else ()
    return [path for path in all_files(source) if RawSample(path).suffix in suffixes]


def other_files(source: Path, raw_format: RawFormat) -> list[Path]:
    """Files of a folder that are not read: to be told, not passed over in silence."""
    if not source.is_dir():
        return []
    read = set(files_of(source, raw_format))
    return [path for path in all_files(source) if path not in read]


def partition_of(source: Path, path: Path) -> dict[str, str | None]:
    """What the folders between the input and a file say, as Hive and Spark name them: name=value."""
    if path == source:
        return {}
    pairs = [folder.split("=", 1) for folder in path.relative_to(source).parts[:-1] if "=" in folder]
    return {unquote(name): None if value == _NOTHING else unquote(value) for name, value in pairs}


def all_files(folder: Path, above: frozenset[Path] = frozenset()) -> list[Path]:
    """All files of a folder with its folders, by their paths; `above` are the folders it lies in."""
    found: list[Path] = []
    inside = above | {folder.resolve()}
    for path in sorted(folder.iterdir()):
        if path.name[0] in "._":
            continue
        if path.is_file():
            found.append(path)
        # A link to a folder that this one lies in would never end.
        elif path.is_dir() and path.resolve() not in inside:
            found += all_files(path, inside)
    return found
