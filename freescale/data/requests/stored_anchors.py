"""The anchors of a large log in files that all processes of a machine share.

    FOLDER/requests/DATA-RULE/     user.npy  start.npy  tokens.npy  groups-SPLIT.npy  facts.json

One process makes them, some users at a time, in two passes: the first counts the anchors of every day, so that the
second knows where each of them goes. Splits are runs of days, so they are parts of the same files. 12 bytes an anchor,
once a machine; DATA is a digest of the histories and RULE one of what an anchor is, so that files of other data are
made again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from freescale.data.pools import PoolRule
from freescale.data.requests.anchors import DAY_S, AnchorRule, days_of, has_label, no_anchors
from freescale.data.requests.request_index import RequestIndex
from freescale.data.scan import row_blocks
from freescale.data.source import IntArray, Split
from freescale.data.stored.digest import digest_arrays, digest_parts
from freescale.data.stored.durable import sync_tree
from freescale.errors import DataError
from freescale.jagged import spans

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

FOLDER, FACTS = "requests", "facts.json"
_VERSION = 1
_SPLITS: tuple[Split, ...] = ("train", "valid", "test")
_PART = 1 << 22
"""Anchors looked at together where groups are counted."""


@runtime_checkable
class SharedSource(Protocol):
    """A source whose columns lie in memory maps, in a folder that may hold more files."""

    folder: Path
    offsets: IntArray

    def column(self, name: str) -> npt.NDArray[np.generic]:
        """A column of all events, row after row."""


def stored_anchors(
    source: Any, split: Split, rule: AnchorRule, pools: PoolRule | None, *, max_length: int
) -> RequestIndex:
    """The anchors of a split as `index_of_anchors` finds them, with their tokens; made where they are not there.

    Args:
        source: a `SharedSource`; of pools also an `IndexedSource`.
        split: part of the log.
        rule: which events are anchors.
        pools: what a history is made of; None: the last events of all.
        max_length: tokens of a request at most.
    """
    data = _digest({"parts": digest_parts(source), "lengths": digest_arrays(np.asarray(source.lengths))})
    what = {
        "version": _VERSION,
        "column": rule.column,
        "history": rule.history,
        "days": rule.days,
        "pools": None if pools is None else asdict(pools),
        "max_length": max_length,
    }
    folder = source.folder / FOLDER / f"{data}-{_digest(what)}"
    if not (folder / FACTS).exists():
        with _alone(folder.parent):
            if not (folder / FACTS).exists():
                _make(source, folder, rule, pools, max_length)
                _remove_others(folder.parent, data)
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    begin, end = facts["splits"][split]
    if begin >= end:
        raise no_anchors(split, rule, facts["anchors"])
    user, start, tokens = (_opened(folder / f"{name}.npy")[begin:end] for name in ("user", "start", "tokens"))
    return RequestIndex(user, start, None, _opened(folder / f"groups-{split}.npy"), tokens)


def _make(source: Any, folder: Path, rule: AnchorRule, pools: PoolRule | None, max_length: int) -> None:
    """Write the files of all splits aside, and give them their name when they are whole."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        days, counts, last = _count(source, rule)
        total = int(counts.sum())
        if total:
            _write(source, aside, rule, pools, max_length, days, counts)
        cuts = [int(counts[days < day].sum()) for day in _edges(rule, last)]
        splits = dict(zip(_SPLITS, itertools.pairwise(cuts)))
        for split, (begin, end) in splits.items():
            if end > begin:
                _write_groups(aside, split, begin, end)
        facts = {"anchors": total, "splits": splits}
        (aside / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        sync_tree(aside)
        os.rename(aside, folder)
    except OSError as error:
        if (folder / FACTS).exists():  # another machine has been faster
            return
        raise DataError(
            "the index of requests cannot be written beside the data",
            got=f"{folder.parent}: {error.strerror or error}",
            next_step="make the folder writable, or begin one training where it is; later ones only read it",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _edges(rule: AnchorRule, last: int) -> list[int]:
    """First day of each split, and the end; a log begins in 1970 at the earliest."""
    found = days_of(rule, last)
    return [found["train"][0], *(found[split][1] for split in _SPLITS)]


def _count(source: Any, rule: AnchorRule) -> tuple[IntArray, IntArray, int]:
    """(days that have anchors, how many each, last day of the log)."""
    found: dict[int, int] = {}
    last = -1
    for _, _, day, latest in _anchors(source, rule):
        for one, count in zip(*(each.tolist() for each in np.unique(day, return_counts=True))):
            found[one] = found.get(one, 0) + count
        last = max(last, latest)
    days = np.array(sorted(found), np.int64)
    return days, np.array([found[day] for day in days.tolist()], np.int64), last


def _write(
    source: Any,
    folder: Path,
    rule: AnchorRule,
    pools: PoolRule | None,
    max_length: int,
    days: IntArray,
    counts: IntArray,
) -> None:
    """Every anchor to its place: by day, inside a day as they come, which is by user and time."""
    shape = (int(counts.sum()),)
    out = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.int32, shape=shape)
        for name in ("user", "start", "tokens")
    }
    index = source.pools(pools) if pools is not None else None
    next_place = np.cumsum(counts) - counts
    for user, event, day, _ in _anchors(source, rule):
        past = event if index is None else index.counts(user, event)
        number = np.searchsorted(days, day)
        order = np.argsort(number, kind="stable")
        of_day = np.bincount(number, minlength=len(days))
        place, _ = spans(next_place, of_day)
        out["user"][place] = user[order]
        out["start"][place] = event[order]
        out["tokens"][place] = (np.minimum(past, max_length - 1) + 1)[order]
        next_place += of_day
    for each in out.values():
        each.flush()


def _anchors(source: Any, rule: AnchorRule) -> Iterator[tuple[IntArray, IntArray, IntArray, int]]:
    """(user, event, day) of anchors and the last day of any event, some users at a time."""
    time, label = source.column("time"), source.column(rule.column)
    for block in row_blocks(source):
        first, end = int(source.offsets[block[0]]), int(source.offsets[block[-1] + 1])
        row = np.repeat(block, np.diff(source.offsets[block[0] : block[-1] + 2]))
        number = np.arange(first, end) - source.offsets[row]
        day = np.asarray(time[first:end], np.int64) // DAY_S
        found = np.flatnonzero((number >= rule.history) & has_label(label[first:end]))
        yield row[found], number[found], day[found], int(day.max(initial=-1))


def _write_groups(folder: Path, split: Split, begin: int, end: int) -> None:
    """How many anchors follow each other of one user; the count of runs is known only when all are found."""
    user, sizes = _opened(folder / "user.npy"), folder / f"groups-{split}.raw"
    run_begin, num_runs = begin, 0
    with sizes.open("wb") as file:
        for at in range(begin + 1, end, _PART):
            stop = min(at + _PART, end)
            edges = np.flatnonzero(user[at:stop] != user[at - 1 : stop - 1]) + at
            if len(edges):
                file.write(np.diff(edges, prepend=run_begin).astype(np.int32).tobytes())
                run_begin, num_runs = int(edges[-1]), num_runs + len(edges)
        file.write(np.array([end - run_begin], np.int32).tobytes())
    shape = (num_runs + 1,)
    out = np.lib.format.open_memmap(folder / f"groups-{split}.npy", mode="w+", dtype=np.int32, shape=shape)
    raw = np.memmap(sizes, np.int32, mode="r")
    for at in range(0, len(raw), _PART):
        out[at : at + _PART] = raw[at : at + _PART]
    out.flush()
    del raw
    sizes.unlink()


def _opened(path: Path) -> IntArray:
    return np.asarray(np.load(path, mmap_mode="r"))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of a machine at a time; the others wait, and find what it has made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    except OSError as error:
        raise DataError(
            "the index of requests cannot be written beside the data",
            got=f"{folder}: {error.strerror or error}",
            next_step="make the folder writable, or begin one training where it is; later ones only read it",
        ) from error
    with file:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: each makes its own, and one name counts
                fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _remove_others(folder: Path, data: str) -> None:
    """Files of data that is there no more; whoever reads them now still can."""
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith((".", f"{data}-")):
            shutil.rmtree(path, ignore_errors=True)


def _digest(said: Any) -> str:
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=8).hexdigest()
