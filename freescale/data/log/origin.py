"""What a window was sealed from: files by their contents, so that none is sealed twice and none is passed over."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freescale.data.log.log_file import Log
from freescale.data.preparing.input_files import all_files
from freescale.data.stored.digest import sample_file
from freescale.errors import DataError

_BLOCKS = 64
"""Of 64 KiB that stand for a file; one of at most 4 MiB is read whole."""


@dataclass(frozen=True)
class OriginFile:
    """One file of raw input.

    Args:
        name: its path below the input.
        size: in bytes.
        digest: of its contents, of a large file of parts of it.
    """

    name: str
    size: int
    digest: str


def look_at(source: Path) -> list[OriginFile]:
    """The files of an input: itself, or all of a folder."""
    if not source.exists():
        raise DataError(f"There is no input {source}", next_step="check the path of the raw interactions")
    files = all_files(source) if source.is_dir() else [source]
    found = [
        OriginFile(
            str(path.relative_to(source)) if source.is_dir() else path.name,
            path.stat().st_size,
            sample_file(path, num_blocks=_BLOCKS),
        )
        for path in files
    ]
    if not found:
        raise DataError(f"{source} holds no files", next_step="check the path of the raw interactions")
    return found


def as_words(files: list[OriginFile], *, part: int, until: int | None) -> dict[str, Any]:
    """What an entry of log.json keeps.

    Args:
        files: that were sealed.
        part: which window of those cut from them, from 0.
        until: where the part ends, in seconds since 1970; None: it is the last.
    """
    return {"kind": "files", "files": [asdict(file) for file in files], "part": part, "until": until}


def new_files(log: Log | None, files: list[OriginFile], source: Path) -> list[OriginFile]:
    """Those of an input that are not in the log yet.

    Raises:
        DataError: all of them are, or one that is was changed since.
    """
    sealed: dict[str, int] = {}
    names: dict[str, tuple[OriginFile, int]] = {}
    for entry in log.windows if log is not None else ():
        for words in entry.origin["files"]:
            known = OriginFile(**words)
            sealed[known.digest] = entry.number
            names[known.name] = known, entry.number
    fresh = []
    for file in files:
        if file.digest in sealed:
            continue
        if source.is_dir() and file.name in names:
            before, number = names[file.name]
            raise DataError(
                f"{source / file.name} was changed after it was sealed in window {number}",
                got=f"{file.size:,} bytes, then {before.size:,}",
                allowed="files that are written once: new events in new files",
                next_step="put the file back as it was, and new events into another file",
            )
        fresh.append(file)
    if not fresh:
        windows = sorted({sealed[file.digest] for file in files})
        raise DataError(
            f"{source} is in the log already",
            got="window " + ", ".join(map(str, windows)),
            next_step="nothing is left to do; new events come in new files",
        )
    return fresh


def unfinished(log: Log | None) -> tuple[list[OriginFile], int, int] | None:
    """Files of which a sealer that was killed has sealed only some parts: the files, parts done, where they end."""
    if log is None or not log.windows:
        return None
    origin = log.windows[-1].origin
    if origin["until"] is None:
        return None
    return [OriginFile(**words) for words in origin["files"]], origin["part"] + 1, origin["until"]
