"""What a window was sealed from, so that no event is sealed twice and none is passed over.

    freescale log append LOG raw/                        files and folders
    freescale log append LOG delta:PATH                  versions of a Delta table
    freescale log append LOG iceberg:CATALOG.SPACE.NAME  snapshots of an Iceberg table
    freescale log append LOG kafka:HOST:PORT/TOPIC       offsets of a topic

The log itself says how far an origin was read: its last entry, and no consumer group. So whatever happened to a sealer,
the next one goes on behind what is sealed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from freescale import registry
from freescale.data.log.log_file import Log
from freescale.errors import DataError

Words = dict[str, Any]
"""What log.json keeps of the part of an origin that was sealed; plain values."""
_OWN = ("part", "until")
FILES = "files"


class Origin(Protocol):
    """Somewhere events come from. Registered in the family "origin", made from what stands behind `KIND:`.

    Args:
        kind: its name there, under which its words say it, too.
    """

    kind: str

    def describe(self) -> str:
        """What it is, for people."""

    def new(self, before: list[Words]) -> Words:
        """What is there now and was not sealed before, in words; DataError where there is nothing, or it was changed.

        Args:
            before: the words of all windows that are from an origin of this kind, oldest first, and their numbers
                under "window".
        """

    def again(self, words: Words) -> Words:
        """The same words, where what they stand for is still there; DataError else. An append was killed in it."""

    def fetch(self, words: Words, work: Path) -> Path:
        """A file or folder with these events that `prepare` can read; `work` is a folder of one's own."""


def open_origin(address: str | Path) -> Origin:
    """The origin of this address: a path, or KIND:WHERE."""
    kind, _, where = str(address).partition(":")
    if isinstance(address, str) and where and kind in registry.names("origin") and kind != FILES:
        found: Origin = registry.find("origin", kind).make(where)
        return found
    made: Origin = registry.find("origin", FILES).make(str(address))
    return made


def plan(origin: Origin, log: Log | None) -> tuple[Words, int, int | None]:
    """What to seal, the part to begin with, and where in time that begins."""
    kind = origin.kind
    entries = () if log is None else log.windows
    last = entries[-1].origin if entries else None
    if last is not None and last["until"] is not None:
        # A sealer was killed between two windows of one input.
        if last["kind"] != kind:
            raise unfinished(origin.describe(), f"{last['kind']} came first")
        return origin.again(without_part(last)), last["part"] + 1, last["until"]
    before = [
        {**without_part(entry.origin), "window": entry.number}
        for entry in entries
        if entry.origin["kind"] == kind
    ]
    return origin.new(before), 0, None


def with_part(words: Words, *, part: int, until: int | None) -> Words:
    """What an entry of log.json keeps.

    Args:
        words: of the origin.
        part: which window of those cut from them, from 0.
        until: where the part ends, in seconds since 1970; None: it is the last.
    """
    return {**words, "part": part, "until": until}


def without_part(words: Mapping[str, Any]) -> Words:
    """The words of an origin alone."""
    return {name: value for name, value in words.items() if name not in _OWN}


def unfinished(got: str, why: str) -> DataError:
    """The error of an input that is not the one that an append was killed in."""
    return DataError(
        "The last append to this log was killed, and its input comes first",
        got=f"{got}: {why}",
        next_step="append the same input again; then this one",
    )


def nothing_new(what: str, got: str) -> DataError:
    """The error of an input that is in the log as a whole."""
    return DataError(
        f"{what} is in the log already",
        got=got,
        next_step="nothing is left to do; new events come in new files, versions or messages",
    )


def missing_package(package: str, extra: str) -> DataError:
    """The error of an origin whose package is not installed."""
    return DataError(
        f"{extra} needs the package {package}", got="not installed", next_step=f"pip install {package}"
    )
