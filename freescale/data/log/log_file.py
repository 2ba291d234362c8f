"""log.json: which windows a log has, each with a fingerprint that stands for it and for all windows before it.

    log/  log.json          what holds for the whole log, and an entry a window
          window-000017/    an ordinary prepared folder, and targets.npy; it never changes
          tail-000017/      the latest events of every user after window 17; what the next window begins with

A window counts once log.json has its entry. The fingerprint of an entry is that of all its words, the fingerprint of
its folder and that of the entry before among them: two logs with the same last fingerprint are the same log.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from freescale.data.stored.durable import write_durably
from freescale.data.stored.manifest import LOG_AGAIN, LOG_FILE
from freescale.errors import DataError

LOG_FORMAT = "freescale-log"
LOG_VERSION = 1
TARGETS_FILE = "targets.npy"


@dataclass(frozen=True, kw_only=True)
class LogRules:
    """What holds for every window, decided by the first.

    Args:
        max_length: inputs of a row at most: a target and as many events before it are kept together.
        max_late: seconds that an event may be older than what was sealed before; None: any.
        features: of an event.
        ids: kinds of ids of users and items.
        actions: numbers of actions that are words; None where actions are numbers.
        schema: further features of events, in words; None where there is no schema.
    """

    max_length: int
    max_late: int | None
    features: tuple[str, ...]
    ids: dict[str, str]
    actions: dict[str, float] | None = None
    schema: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class WindowEntry:
    """What log.json says of a window.

    Args:
        number: from 0.
        rows: users active in it, one row each, more for those with very many events.
        events: new ones.
        targets: those to learn from; a user's very first event can be none.
        items: in the catalogue so far.
        first: time of the earliest of its events that was not late, in seconds since 1970; its beginning.
        last: time of the latest event of the log so far; its end, and the clock of what ages.
        late: events older than the end of the window before.
        dropped: events that were too late.
        content: fingerprint of the folder.
        parent: fingerprint of the window before; "" for the first.
        origin: what it was sealed from.
        deleted: whether its folder was deleted by `freescale log drop`.
    """

    number: int
    rows: int
    events: int
    targets: int
    items: int
    first: int
    last: int
    late: int
    dropped: int
    content: str
    parent: str
    origin: dict[str, Any] = field(default_factory=dict)
    deleted: bool = False

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return window_name(self.number)

    @property
    def fingerprint(self) -> str:
        """Of this window and all before it; the same after its folder was deleted."""
        said = asdict(replace(self, deleted=False))
        return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Log:
    """A log as log.json tells of it.

    Args:
        path: the folder.
        rules: what holds for every window.
        windows: their entries, in order.
    """

    path: Path
    rules: LogRules
    windows: tuple[WindowEntry, ...]

    @property
    def end(self) -> int | None:
        """Time of the latest event; None where there is none."""
        return self.windows[-1].last if self.windows else None

    @property
    def fingerprint(self) -> str:
        """Of all windows."""
        return self.windows[-1].fingerprint if self.windows else ""

    def window_path(self, number: int) -> Path:
        """Where a window lies."""
        return self.path / window_name(number)

    def with_window(self, entry: WindowEntry) -> Log:
        """The log with one more window."""
        return replace(self, windows=(*self.windows, entry))


def window_name(number: int) -> str:
    """Folder of a window."""
    return f"window-{number:06d}"


def tail_name(number: int) -> str:
    """Folder of the latest events of every user after a window."""
    return f"tail-{number:06d}"


def is_log(path: str | Path) -> bool:
    """Whether this folder holds a log."""
    try:
        said = json.loads((Path(path) / LOG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("format") == LOG_FORMAT


def save_log(log: Log) -> None:
    """Make the entries of this log those that count, all or none."""
    said = {
        "format": LOG_FORMAT,
        "version": LOG_VERSION,
        **asdict(log.rules),
        "windows": [{**asdict(entry), "fingerprint": entry.fingerprint} for entry in log.windows],
    }
    write_durably(log.path / LOG_FILE, json.dumps(said, indent=1) + "\n")


def load_log(path: str | Path) -> Log:
    """The log in a folder, its entries compared with their fingerprints."""
    folder = Path(path)
    file = folder / LOG_FILE
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{folder} is not a log: it has no readable {LOG_FILE}",
            got=error.strerror,
            next_step=f"`freescale log append {folder} INPUT` makes one",
        ) from error
    except ValueError as error:
        raise damaged_log(file, str(error)) from error
    if not isinstance(said, dict) or said.get("format") != LOG_FORMAT:
        raise damaged_log(file, f"it does not say that it is a {LOG_FORMAT}")
    if said.get("version") != LOG_VERSION:
        raise DataError(
            f"The log {folder} was written by another version of FreeScale",
            got=f"version {said.get('version')}",
            allowed=f"version {LOG_VERSION}",
        )
    try:
        rules = LogRules(
            **{key: said[key] for key in ("max_length", "max_late", "ids", "actions")},
            features=tuple(said["features"]),
            schema=said.get("schema"),
        )
        windows = tuple(_entry(file, each) for each in said["windows"])
    except (KeyError, TypeError) as error:
        raise damaged_log(file, f"it lacks or has wrong {error}") from error
    parent = ""
    for number, entry in enumerate(windows):
        if entry.number != number:
            raise damaged_log(file, f"{entry.folder} stands where {window_name(number)} belongs")
        if entry.parent != parent:
            raise damaged_log(file, f"{entry.folder} does not follow from the window before it")
        parent = entry.fingerprint
    return Log(folder, rules, windows)


def _entry(file: Path, said: dict[str, Any]) -> WindowEntry:
    words = dict(said)
    told = words.pop("fingerprint", None)
    entry = WindowEntry(**words)
    if told != entry.fingerprint:
        raise damaged_log(file, f"the entry of {entry.folder} was changed")
    return entry


def damaged_log(path: Path, why: str) -> DataError:
    """The error of a log that cannot be trusted."""
    return DataError(
        f"{path} is missing or damaged",
        got=why,
        next_step=LOG_AGAIN,
    )
