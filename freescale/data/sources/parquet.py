"""Reads a prepared data set: any rows, only the row groups they lie in, and a bounded cache of those."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from freescale.data.columns.ids import IdKinds
from freescale.data.columns.lists import from_arrow
from freescale.data.features.feature_source import ItemFeatures, empty_column, padded_column
from freescale.data.schema.feature import Feature
from freescale.data.source import Histories, IntArray, ItemCatalog
from freescale.data.stored.dataset_index import (
    check_sum,
    load_item_features,
    load_items,
    load_lengths,
    load_schema_of,
)
from freescale.data.stored.digest import FileStamp
from freescale.data.stored.manifest import (
    DATASET_FILE,
    ITEMS_FILE,
    LENGTHS_FILE,
    damaged,
    id_kinds_of,
    load_manifest,
    words_file,
)
from freescale.data.stored.shards import shards_of
from freescale.data.stored.storage import is_address, local_path, open_elsewhere
from freescale.data.words.id_words import find_words, read_ids, read_words
from freescale.data.words.item_names import ItemNames
from freescale.errors import DataError
from freescale.jagged import offsets_of, spans
from freescale.registry import register

# Every open shard costs a file descriptor in every worker; opening one again costs about a millisecond.
_MAX_OPEN_SHARDS = 32


class RowRangeError(DataError, IndexError):
    """A row was asked for that the data set does not have."""


@dataclass(frozen=True)
class _RowGroup:
    """One decoded row group."""

    users: IntArray
    offsets: IntArray
    columns: dict[str, npt.NDArray[np.generic]]
    user_columns: dict[str, npt.NDArray[np.generic]]

    @property
    def num_bytes(self) -> int:
        """Memory it takes in the cache."""
        columns = (*self.columns.values(), *self.user_columns.values())
        return self.users.nbytes + self.offsets.nbytes + sum(column.nbytes for column in columns)


class ParquetSource:
    """A prepared data set on disk; implements `SequenceSource`.

    It may be pickled and used after a fork: files are opened by the process that reads. It is not meant to be
    read by several threads at once.

    Args:
        path: folder written by `freescale prepare`, or an address of one elsewhere (s3://bucket/folder).
        cache_mb: decoded row groups kept in memory, in MiB per process; 0 keeps none.
        disk_cache_gb: copies of files that live elsewhere, kept on this machine for all its processes.
    """

    def __init__(self, path: str | Path, *, cache_mb: float = 256, disk_cache_gb: float = 32) -> None:
        store = open_elsewhere(str(path), limit_gb=disk_cache_gb) if is_address(path) else None
        self.path = store.folder if store else local_path(path)
        self.cache_mb = cache_mb
        manifest = load_manifest(self.path)
        self.name: str = manifest["name"]
        self.features: tuple[str, ...] = tuple(manifest["features"])
        self.id_kinds: dict[str, Any] = id_kinds_of(manifest)
        self.schema, self.statistics = load_schema_of(self.path, manifest)
        self._event_features = [
            each for each in self.schema if each.of in ("event", "request") and not each.cross
        ]
        self._user_features = self.schema.stored("user")
        own = [each.name for each in (*self._event_features, *self._user_features)]
        self._columns = {role: manifest.get("columns", {}).get(role, role) for role in ("user", *own)}
        self._item_digest: str | None = manifest.get("item_features")
        self.table_ids: dict[str, Any] = dict(manifest.get("table_ids", {}))
        self._words: dict[str, str] = dict(manifest.get("words", {}))
        self._min_events = int(manifest.get("min_events", 0)) if "root" in manifest else 0
        self._shards = shards_of(manifest, self.path, store, limit_gb=disk_cache_gb)
        # A copy of a file that lives elsewhere is ours: nobody exchanges it.
        self._stamps = [None if shard.store else FileStamp.of(shard.path) for shard in self._shards]
        self._contents: dict[int, str] = {}
        self._catalogue: str | None = manifest.get("catalogue")
        self._groups = np.array([n for shard in self._shards for n in shard.row_groups], dtype=np.int64)
        self._group_starts = np.cumsum(self._groups) - self._groups
        group_counts = [len(shard.row_groups) for shard in self._shards]
        self._group_shards = np.repeat(np.arange(len(self._shards)), group_counts)
        self._num_rows = int(manifest["num_users"])
        if int(self._groups.sum()) != self._num_rows:
            raise damaged(self.path / DATASET_FILE, "its row groups do not add up to its number of users")
        self._start_process()
        self._lengths: IntArray | None = load_lengths(self.path, self._num_rows)
        check_sum(self.path, self._lengths, manifest.get("num_events"))

    def _start_process(self) -> None:
        self._pid = os.getpid()
        self._lengths = None
        self._items: ItemCatalog | None = None
        self._item_features: ItemFeatures | None = None
        self._files: OrderedDict[int, Any] = OrderedDict()
        self._cache: OrderedDict[int, _RowGroup] = OrderedDict()
        self._cached_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        # Pickling the memory map would copy every length into the message; the receiver maps the file itself.
        held = {"_lengths", "_items", "_item_features", "_files", "_cache", "_cached_bytes", "_pid"}
        return {key: value for key, value in self.__dict__.items() if key not in held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_process()

    def __len__(self) -> int:
        return self._num_rows

    @property
    def lengths(self) -> IntArray:
        """[rows] number of events of each history, mapped from disk."""
        if self._lengths is None:
            self._lengths = load_lengths(self.path, self._num_rows)
        return self._lengths

    @property
    def groups(self) -> IntArray:
        """Rows of each row group, over all shards in order."""
        return self._groups

    @property
    def items(self) -> ItemCatalog:
        """The items that occur, read on first use."""
        if self._items is None:
            self._items = load_items(self.path, self._catalogue)
        return self._items

    def item_features(self) -> ItemFeatures:
        """What is known of the items, read on first use."""
        if self._item_features is None:
            self._item_features = load_item_features(
                self.path, self.schema, self.statistics, self._item_digest
            )
        return self._item_features

    def known_ids(self, table: str) -> IntArray | None:
        """All ids of features that share a table, ascending, where they are words; None where they are numbers."""
        if self.table_ids.get(table) != "text":
            return None
        return read_ids(self.path / words_file(table))

    @property
    def table_kinds(self) -> IdKinds:
        """Of the ids of every table."""
        return {**self.id_kinds, **self.table_ids}

    def find_words(self, table: str, ids: IntArray, /) -> Any:
        """What stands in the input for ids of a table whose ids are text; null for ids that it does not have."""
        return find_words(self.path / words_file(table), ids)

    def feature_words(self, table: str, ids: IntArray) -> list[str]:
        """What stands in the input for ids of a table whose ids are text."""
        return read_words(self.path / words_file(table), ids).to_pylist()

    def item_names(self, ids: IntArray, /) -> ItemNames:
        """The user's own ids of these items."""
        kind = self.id_kinds["item"]
        words = read_words(self.path / words_file("item"), ids) if kind == "text" else None
        return ItemNames(ids, kind, words)

    def digests(self) -> dict[str, str]:
        """What stands for the histories of every shard, and where there are any for features and words."""
        parts = {shard.name: self._contents_of(n) for n, shard in enumerate(self._shards)}
        more = {f"the features in {ITEMS_FILE}": self._item_digest} if self._item_digest else {}
        return parts | {name: f"written:{digest}" for name, digest in (more | self._words).items()}

    def read(self, rows: Sequence[int] | IntArray) -> Histories:
        """The histories of these rows, in the order asked for; a row may be asked for twice."""
        wanted = self._checked_rows(rows)
        lengths = np.asarray(self.lengths[wanted])
        offsets = offsets_of(lengths)
        users = np.empty(len(wanted), dtype=np.int64)
        columns = self._room(self._event_features, int(offsets[-1]))
        user_columns = self._room(self._user_features, len(wanted))
        group_of = np.searchsorted(self._group_starts, wanted, side="right") - 1
        by_group = np.argsort(group_of, kind="stable")
        cuts = np.flatnonzero(np.diff(group_of[by_group])) + 1
        for places in np.split(by_group, cuts) if len(wanted) else []:
            number = int(group_of[places[0]])
            group = self._row_group(number)
            local = wanted[places] - self._group_starts[number]
            users[places] = group.users[local]
            source, _ = spans(group.offsets[local], lengths[places])
            target, _ = spans(offsets[places], lengths[places])
            for name, column in columns.items():
                column[target] = group.columns[name][source]
            for name, column in user_columns.items():
                column[places] = group.user_columns[name][local]
        return Histories(users=users, offsets=offsets, columns=columns, user_columns=user_columns)

    def _room(self, features: Sequence[Feature], size: int) -> dict[str, npt.NDArray[np.generic]]:
        return {each.name: empty_column(each, size, self.statistics) for each in features}

    def _longest(self, name: str) -> int:
        return int(self.statistics.get(name, {}).get("longest", 1))

    def _checked_rows(self, rows: Sequence[int] | IntArray) -> IntArray:
        wanted = np.asarray(rows)
        if wanted.size == 0:
            return np.zeros(0, dtype=np.int64)
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise RowRangeError(
                "Rows are asked for by number", got=rows, allowed="a flat sequence of whole numbers"
            )
        outside = (wanted < 0) | (wanted >= self._num_rows)
        if outside.any():
            raise RowRangeError(
                f"{self.path} has no such row",
                got=int(wanted[outside][0]),
                allowed=f"0 to {self._num_rows - 1}",
            )
        return wanted.astype(np.int64, copy=False)

    def _row_group(self, number: int) -> _RowGroup:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        group = self._decode(number)
        limit = self.cache_mb * 2**20
        if group.num_bytes <= limit:
            self._cache[number] = group
            self._cached_bytes += group.num_bytes
        while self._cached_bytes > limit:
            self._cached_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return group

    def _decode(self, number: int) -> _RowGroup:
        shard_number = int(self._group_shards[number])
        path = self._shards[shard_number].path
        local = number - int(np.searchsorted(self._group_shards, shard_number))
        names = self._columns
        try:
            # Arrow's thread pool does not survive a fork, and data workers are forked.
            table = self._file(shard_number).read_row_group(
                local, columns=list(names.values()), use_threads=False
            )
            lists = {each.name: table[names[each.name]].combine_chunks() for each in self._event_features}
            group = _RowGroup(
                users=table[names["user"]].to_numpy(),
                offsets=lists["item"].offsets.to_numpy().astype(np.int64),
                columns={
                    each.name: self._array(each, lists[each.name].values) for each in self._event_features
                },
                user_columns={each.name: self._array(each, table[each.name]) for each in self._user_features},
            )
        except (OSError, KeyError, AttributeError, pa.ArrowException) as error:
            raise damaged(path, f"row group {local} cannot be read: {error}") from error
        self._check_unchanged(shard_number)
        start = self._group_starts[number]
        expected = self.lengths[start : start + self._groups[number]]
        sizes = {len(column) for column in group.columns.values()}
        found = np.diff(group.offsets)
        # Histories that others have written may be too short: the index says that they are empty.
        counted = np.where(found < self._min_events, 0, found)
        if not np.array_equal(counted, expected) or sizes != {int(found.sum())}:
            raise damaged(path, f"row group {local} does not have the lengths that {LENGTHS_FILE} gives")
        return group

    def _array(self, feature: Feature, values: Any) -> npt.NDArray[np.generic]:
        """A column of a row group, lists of features padded to the longest of the data set."""
        column = padded_column(from_arrow(values), self._longest(feature.name))
        return column.astype(np.float32 if feature.kind in ("number", "vector") else np.int64, copy=False)

    def _check_unchanged(self, shard_number: int) -> None:
        """A shard exchanged in the middle of a run ends it; one written again with the same histories does not.

        After the read: what still looks as it did on opening was that file when it was read, too.
        """
        shard = self._shards[shard_number]
        if shard.store is not None:
            return
        try:
            stamp = FileStamp.of(shard.path)
            if stamp == self._stamps[shard_number]:
                return
            # A touched file, or a file system that numbers files anew: what is in it decides.
            if shard.digest is not None:
                shard.check()
            same = shard.contents() == self._contents_of(shard_number)
        except OSError as error:
            raise _exchanged(shard.path, error.strerror or str(error)) from error
        except DataError as error:
            raise _exchanged(shard.path, error.got) from error
        if not same:
            raise _exchanged(shard.path, "it holds other histories")
        self._stamps[shard_number] = stamp

    def _contents_of(self, shard_number: int) -> str:
        """What a shard held when it was first asked for."""
        if shard_number not in self._contents:
            self._contents[shard_number] = self._shards[shard_number].contents()
        return self._contents[shard_number]

    def _file(self, shard_number: int) -> Any:
        # A forked child shares file offsets with its parent, so it opens its own files.
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._files = OrderedDict()
        if shard_number not in self._files:
            self._files[shard_number] = self._shards[shard_number].open()
            if len(self._files) > _MAX_OPEN_SHARDS:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(shard_number)
        return self._files[shard_number]


@dataclass(frozen=True, kw_only=True)
class ParquetOptions:
    """The keys of a recipe that say how a prepared folder is read; see ParquetSource."""

    cache_mb: float = 256
    disk_cache_gb: float = 32


@register("source", "parquet", options=ParquetOptions)
def make_parquet(path: str, options: ParquetOptions, *, seed: int) -> ParquetSource:
    """The data set of a prepared folder, the same for every seed."""
    return ParquetSource(path, cache_mb=options.cache_mb, disk_cache_gb=options.disk_cache_gb)


def _exchanged(path: Path, why: object) -> DataError:
    return DataError(
        f"The data set file {path} has changed since this run opened it",
        got=why,
        next_step="put the data set back as it was and run the same command again: it resumes from the last checkpoint",
    )
