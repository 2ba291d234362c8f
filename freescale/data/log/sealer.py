"""append(): seals new events as windows of a log, each wholly or not at all, each event once.

What happens to the folder of a log, in this order: a tail and a window are renamed into it, log.json is replaced by
one that names the window, the tail before is removed. Killed between any two of these, the next append removes what
log.json does not name, and goes on from its last entry.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from freescale.data.log.log_file import (
    Log,
    LogRules,
    WindowEntry,
    load_log,
    save_log,
    tail_name,
    window_name,
)
from freescale.data.log.log_schema import check_schema, check_words, same_schema
from freescale.data.log.origin import Words, open_origin, plan, with_part
from freescale.data.log.window_plan import plan_windows
from freescale.data.log.window_writer import Cut, content_of, users_of, write_window
from freescale.data.preparing.preparation import DatasetSummary, prepare
from freescale.data.schema.feature import Schema
from freescale.data.schema.reading import schema_from
from freescale.data.source import IntArray
from freescale.data.sources.parquet import ParquetSource
from freescale.data.stored.durable import sync_folder, sync_tree
from freescale.data.stored.manifest import LOG_FILE, is_dataset
from freescale.data.stored.storage import is_address, local_path
from freescale.errors import DataError

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

MAX_LENGTH = 200
_WORK = ".sealing"


@dataclass(frozen=True)
class Sealed:
    """What an append did.

    Args:
        log: the log now.
        windows: entries of the windows it sealed.
        taken: what the input was taken for, a line each.
    """

    log: Log
    windows: tuple[WindowEntry, ...]
    taken: tuple[str, ...]


def append(
    log_dir: str | Path,
    input_path: str | Path,
    *,
    every: int | None = None,
    max_length: int | None = None,
    max_late: int | None = None,
    schema: Schema | Mapping[str, Any] | str | Path | None = None,
    **reading: Any,
) -> Sealed:
    """Seal the events of an input as the next windows of a log, which is made with the first.

    Only what is not in the log yet is read: files of a folder, versions of a table, messages of a topic. An append that
    was killed is finished by the same call.

    Args:
        log_dir: folder of the log.
        input_path: a file, a folder of files, or `delta:`, `iceberg:` or `kafka:` and where that is; see `Origin`.
        every: seconds of a window, counted from 1970; None: one window for all new events.
        max_length: inputs of a row at most; 200, or what the log has.
        max_late: seconds that an event may be older than what was sealed before; None: any, or what the log has.
        schema: further features of events to keep, see `prepare`; the first append decides.
        reading: how the input is read: `format`, `columns` and others of `prepare`.
    """
    if is_address(log_dir):
        raise DataError("A log is sealed on this machine", got=log_dir, next_step="name a folder here")
    folder = local_path(log_dir)
    for name, value in (("every", every), ("max_length", max_length)):
        if value is not None and value < 1:
            raise DataError(f"{name} is at least 1", got=value)
    if max_late is not None and max_late < 0:
        raise DataError("max_late is at least 0", got=max_late)
    asked = schema_from(schema)
    check_schema(asked)
    if is_dataset(input_path):
        raise DataError(
            "a log is made of raw events, and this is a prepared data set",
            got=input_path,
            next_step="append what it was prepared from",
        )
    origin = open_origin(input_path)
    with _alone(folder):
        log = _opened(folder)
        _check_rules(log, max_length=max_length, max_late=max_late)
        if log is not None:
            same_schema(log.rules, asked)
            asked = schema_from(log.rules.schema)
        words, part, low = plan(origin, log)
        work = folder / _WORK
        work.mkdir()
        try:
            chosen = origin.fetch(words, work)
            summary = _prepare(chosen, work / "input", log, {**reading, "schema": asked})
            rules = _rules_of(log, summary, max_length=max_length, max_late=max_late, schema=asked)
            log = log or Log(folder, rules, ())
            log, sealed = _seal_parts(log, work, words, every=every, part=part, low=low)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return Sealed(log, sealed, summary.taken)


def _seal_parts(
    log: Log, work: Path, words: Words, *, every: int | None, part: int, low: int | None
) -> tuple[Log, tuple[WindowEntry, ...]]:
    """Cut the prepared input into windows and seal one after another."""
    new = ParquetSource(work / "input")
    sealed = []
    plan = plan_windows(new, _tail_users(log), end=log.end, rules=log.rules, every=every, low=low)
    for number, cut in enumerate(plan.cuts):
        origin = with_part(words, part=part + number, until=cut.high)
        dropped = plan.dropped if number == 0 else 0
        log = _seal(log, work / f"part-{number:06d}", new, cut, origin=origin, dropped=dropped)
        sealed.append(log.windows[-1])
    return log, tuple(sealed)


def _seal(log: Log, work: Path, new: ParquetSource, cut: Cut, *, origin: dict[str, Any], dropped: int) -> Log:
    """One more window: written aside, renamed, and named in log.json."""
    number = len(log.windows)
    last = _last_window(log)
    work.mkdir()
    counts = write_window(
        work,
        new=new,
        tail=None if last is None else ParquetSource(log.path / tail_name(number - 1)),
        before=None if last is None else last.items,
        words_before=None if last is None else last.path,
        cut=cut,
        rules=log.rules,
        name=f"{log.path.name} {window_name(number)}",
    )
    end = counts.last if log.end is None else max(log.end, counts.last)
    entry = WindowEntry(
        number=number,
        rows=counts.rows,
        events=counts.events,
        targets=counts.targets,
        items=counts.items,
        first=min(counts.first, end),
        last=end,
        late=counts.late,
        dropped=dropped,
        content=content_of(work / "window"),
        parent=log.fingerprint,
        origin=origin,
    )
    for written, name in (("tail", tail_name(number)), ("window", window_name(number))):
        sync_tree(work / written)
        os.rename(work / written, log.path / name)
    sync_folder(log.path)
    log = log.with_window(entry)
    save_log(log)
    if number:
        shutil.rmtree(log.path / tail_name(number - 1))
    return log


def drop(log_dir: str | Path, *, before: int) -> Log:
    """Delete the folders of windows with numbers below `before`; their entries stay, so that steps keep their numbers.

    The last window stays: the next one begins with its catalogue.
    """
    folder = local_path(log_dir)
    load_log(folder)
    with _alone(folder):
        log = _opened(folder)
        assert log is not None
        if before > len(log.windows) - 1:
            raise DataError(
                "The last window of a log stays",
                got=f"--before {before}",
                allowed=f"at most {len(log.windows) - 1}",
            )
        windows = tuple(
            replace(entry, deleted=entry.deleted or entry.number < before) for entry in log.windows
        )
        log = replace(log, windows=windows)
        save_log(log)
        _clean(log)
    return log


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One sealer a log; however a process ends, so does its lock."""
    if folder.exists() and not (folder / LOG_FILE).exists() and not _only_ours(folder):
        raise DataError(
            f"{folder} is not empty and not a log", next_step="name another folder; nothing was touched"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    "Another process is sealing windows of this log",
                    got=folder,
                    next_step="wait until it has ended",
                ) from None
        yield


def _only_ours(folder: Path) -> bool:
    """Whether a folder without log.json is empty, or holds what a sealer has left that was killed in window 0."""
    ours = {window_name(0), tail_name(0), f"{LOG_FILE}.new"}
    return folder.is_dir() and all(path.name in ours or path.name[0] == "." for path in folder.iterdir())


def _opened(folder: Path) -> Log | None:
    """The log, cleared of what a sealer has left that was killed; None where there is none yet."""
    if not (folder / LOG_FILE).exists():
        _clean(Log(folder, LogRules(max_length=1, max_late=None, features=(), ids={}), ()))
        return None
    log = load_log(folder)
    _clean(log)
    return log


def _clean(log: Log) -> None:
    """Remove what log.json does not name."""
    named = {entry.folder for entry in log.windows if not entry.deleted}
    named.add(tail_name(len(log.windows) - 1))
    for path in log.path.iterdir():
        ours = path.name.startswith(("window-", "tail-")) and path.name not in named
        if ours or path.name == _WORK:
            shutil.rmtree(path)
        elif path.name == f"{LOG_FILE}.new":
            path.unlink()


def _prepare(source: Path, out: Path, log: Log | None, reading: Mapping[str, Any]) -> DatasetSummary:
    """The input as an ordinary data set, its ids and actions read like those of the log."""
    options = dict(reading)
    if log is not None:
        options["id_kinds"] = log.rules.ids
        if log.rules.actions is not None:
            options["actions"] = log.rules.actions
    summary = prepare(source, out, min_events=1, rewrite=True, name="input", **options)
    if "time" not in summary.features:
        raise DataError(
            f"A log needs times, and {source.name} has none",
            got=", ".join(summary.features),
            next_step="name the column of the times (`--time`)",
        )
    return summary


def _check_rules(log: Log | None, *, max_length: int | None, max_late: int | None) -> None:
    """What the first window has decided cannot be asked for otherwise later."""
    if log is None:
        return
    for name, asked in (("max_length", max_length), ("max_late", max_late)):
        known = getattr(log.rules, name)
        if asked is not None and asked != known:
            raise DataError(
                f"This log was made with another {name}",
                got=asked,
                allowed="none: it was made without" if known is None else known,
                next_step=f"leave `--{name.replace('_', '-')}` out, or make a new log",
            )


def _rules_of(
    log: Log | None,
    summary: DatasetSummary,
    *,
    max_length: int | None,
    max_late: int | None,
    schema: Schema | None,
) -> LogRules:
    source = ParquetSource(summary.path)
    check_words(source.table_ids)
    if log is None:
        return LogRules(
            max_length=max_length or MAX_LENGTH,
            max_late=max_late,
            features=tuple(summary.features),
            ids={role: str(source.id_kinds[role]) for role in ("user", "item")},
            actions=None if summary.actions is None else dict(summary.actions),
            schema=None if schema is None else schema.words(),
        )
    if tuple(summary.features) != log.rules.features:
        raise DataError(
            "The input has other columns than the log",
            got=_listed(summary.features),
            allowed=_listed(log.rules.features),
            next_step="name the columns as in the first append, or leave one out (`--action ''`)",
        )
    return log.rules


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _last_window(log: Log) -> ParquetSource | None:
    return ParquetSource(log.window_path(len(log.windows) - 1)) if log.windows else None


def _tail_users(log: Log) -> IntArray:
    """Users that the log knows, ascending."""
    if not log.windows:
        return np.zeros(0, np.int64)
    return users_of(ParquetSource(log.path / tail_name(len(log.windows) - 1)))
