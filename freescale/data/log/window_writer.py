"""Writes a window and the tail behind it: new events joined with the latest older ones, in blocks of users."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.log.log_file import TARGETS_FILE, LogRules
from freescale.data.log.log_schema import columns_of, feature_writer
from freescale.data.log.window_rows import Sequences, cut_rows, join, latest
from freescale.data.preparing.writing.dataset_writer import DatasetWriter
from freescale.data.source import IntArray, ItemCatalog
from freescale.data.sources.parquet import ParquetSource
from freescale.data.stored.digest import digest_arrays
from freescale.data.stored.manifest import LENGTHS_FILE, damaged, load_manifest, words_file
from freescale.data.words.word_sorter import WordSorter

_BLOCK_EVENTS = 1 << 21
"""Events joined at once."""
_WORD_MEMORY = 64 << 20
_CONTENT = ("num_users", "num_events", "features", "ids", "catalogue")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which events of an input make a window.

    Args:
        low: the earliest time that counts; None: any.
        high: events before this time; None: all.
        late: events before this time are late; None: none can be.
    """

    low: int | None
    high: int | None
    late: int | None


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What came of a cut."""

    rows: int
    events: int
    targets: int
    items: int
    first: int
    last: int
    late: int


def write_window(
    work: Path,
    *,
    new: ParquetSource,
    tail: ParquetSource | None,
    before: ItemCatalog | None,
    words_before: Path | None,
    cut: Cut,
    rules: LogRules,
    name: str,
) -> Counts:
    """Write work/window and work/tail.

    Args:
        work: a folder of one's own.
        new: the input, prepared.
        tail: the latest events of every user so far.
        before: the catalogue so far.
        words_before: folder with the words of that catalogue.
        cut: which events count.
        rules: of the log.
        name: of the window.
    """
    window, rest = work / "window", work / "tail"
    for folder in (window, rest):
        folder.mkdir()
    columns = columns_of(rules)
    rows, kept = (
        DatasetWriter(folder, columns, 1, id_kinds=rules.ids, extra=feature_writer(rules))  # type: ignore[arg-type]
        for folder in (window, rest)
    )
    targets: list[IntArray] = []
    items: list[IntArray] = []
    counted = _Times()
    try:
        for sequences in _joined(new, tail, cut, counted, items):
            found = cut_rows(sequences.lengths, sequences.fresh, max_length=rules.max_length)
            owner = np.repeat(sequences.users, sequences.lengths)
            events = {"user": owner, **sequences.columns}
            if len(found.lengths):
                rows.add({name: values[found.events] for name, values in events.items()}, found.lengths)
                targets.append(found.targets)
            index, lengths = latest(sequences.lengths, max_length=rules.max_length)
            kept.add({name: values[index] for name, values in events.items()}, lengths)
        catalogue = _more(before, np.concatenate(items))
        number_of = np.concatenate(targets) if targets else np.zeros(0, np.int64)
        np.save(window / TARGETS_FILE, number_of, allow_pickle=False)
        _write_words(window, new, words_before, catalogue.ids, rules)
        about = {"time_unit": "s", "taken": [], **({"actions": rules.actions} if rules.actions else {})}
        both = (catalogue.ids, catalogue.counts, catalogue.train_counts)
        rows.finish(name, "log", about=about, catalogue=both)
        kept.finish(f"{name}, tail", "log", about=about)
    finally:
        rows.abort()
        kept.abort()
    return Counts(
        rows=len(number_of),
        events=counted.events,
        targets=int(number_of.sum()),
        items=len(catalogue.ids),
        first=counted.first,
        last=counted.last,
        late=counted.late,
    )


def content_of(folder: Path) -> str:
    """Fingerprint of a window: of what its manifest promises of the shards, of lengths and targets."""
    manifest = load_manifest(folder)
    said: dict[str, Any] = {key: manifest.get(key) for key in _CONTENT}
    if "schema" in manifest:
        said["schema"] = manifest["schema"]
    said["shards"] = [[shard["row_groups"], shard["digest"]] for shard in manifest["shards"]]
    said["arrays"] = digest_arrays(*(_load_array(folder / file) for file in (LENGTHS_FILE, TARGETS_FILE)))
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()


def _load_array(file: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise damaged(file, str(error)) from error


class _Times:
    """How many events counted, how many were late, and from when to when they go."""

    def __init__(self) -> None:
        self.events = self.late = 0
        self.first, self.last = 2**63 - 1, -(2**63)

    def add(self, times: IntArray, late: int | None) -> None:
        """Count events that are kept."""
        if not len(times):
            return
        behind = np.zeros(len(times), bool) if late is None else times < late
        self.events += len(times)
        self.late += int(behind.sum())
        if not behind.all():
            self.first = min(self.first, int(times[~behind].min()))
        self.last = max(self.last, int(times.max()))


def _joined(
    new: ParquetSource, tail: ParquetSource | None, cut: Cut, counted: _Times, items: list[IntArray]
) -> Iterator[Sequences]:
    """Sequences of all users of either, a block of users at a time."""
    sides = [side for side in (tail, new) if side is not None]
    users = [users_of(side) for side in sides]
    every = np.unique(np.concatenate(users))
    load = np.zeros(len(every), np.int64)
    for side, theirs in zip(sides, users):
        load[np.searchsorted(every, theirs)] += side.lengths
    block = np.cumsum(load) // _BLOCK_EVENTS
    edges = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(every)]
    for start, stop in itertools.pairwise(edges):
        ends = every[start], every[stop - 1]
        parts = [
            side.read(np.arange(np.searchsorted(theirs, ends[0]), np.searchsorted(theirs, ends[1], "right")))
            for side, theirs in zip(sides, users)
        ]
        newer = parts[-1]
        times = newer.columns["time"].astype(np.int64, copy=False)
        keep = np.flatnonzero(within(times, cut))
        counted.add(times[keep], cut.late)
        items.append(newer.columns["item"][keep].astype(np.int64, copy=False))
        sequences = join(parts[0] if tail is not None else None, newer, keep)
        if len(sequences.users):
            yield sequences


def within(times: IntArray, cut: Cut) -> npt.NDArray[np.bool_]:
    """Which of these times a cut takes."""
    inside = np.ones(len(times), bool)
    if cut.low is not None:
        inside &= times >= cut.low
    if cut.high is not None:
        inside &= times < cut.high
    return inside


def users_of(source: ParquetSource) -> IntArray:
    """Users of all rows, ascending, without their events."""
    paths = [source.path / shard["file"] for shard in load_manifest(source.path)["shards"]]
    tables = [pq.read_table(path, columns=["user"], use_threads=False, partitioning=None) for path in paths]
    users: IntArray = np.concatenate([table["user"].to_numpy() for table in tables])
    return users


def _more(before: ItemCatalog | None, items: IntArray) -> ItemCatalog:
    """The catalogue with the events of one more window; all of them are to train on."""
    ids, counts = np.unique(items, return_counts=True)
    if before is not None:
        every = np.union1d(before.ids, ids)
        total = np.zeros(len(every), np.int64)
        total[np.searchsorted(every, before.ids)] += before.counts
        total[np.searchsorted(every, ids)] += counts
        ids, counts = every, total
    return ItemCatalog(ids, counts, counts)


def _write_words(
    window: Path, new: ParquetSource, before: Path | None, items: IntArray, rules: LogRules
) -> None:
    """Words of the catalogue, of this input and of all before; of users those of this input."""
    for role in ("user", "item"):
        if rules.ids[role] != "text":
            continue
        files = [new.path / words_file(role)]
        if role == "item" and before is not None:
            files.append(before / words_file(role))
        sorter = WordSorter(window.parent / f"words-{role}", _WORD_MEMORY, what=role)
        for file in files:
            table = pq.read_table(file, use_threads=False, partitioning=None)
            words = table["word"].cast(pa.large_string()).combine_chunks()
            words = pa.concat_arrays(words.chunks) if isinstance(words, pa.ChunkedArray) else words
            sorter.add(table["id"].to_numpy(), words)
        sorter.write(window / words_file(role), items if role == "item" else None)
