"""Writes a data set: histories in Parquet shards, their lengths, the items and, last, the manifest."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.columns.ids import ID_ROLES, IdKinds
from freescale.data.columns.lists import Column, plain_arrays, to_arrow
from freescale.data.preparing.reading.event_columns import Events, concat_events
from freescale.data.preparing.writing.feature_writer import FeatureWriter
from freescale.data.preparing.writing.item_counts import ItemCounts
from freescale.data.schema.feature import Schema
from freescale.data.source import IntArray
from freescale.data.stored.digest import add_arrays, digest_arrays
from freescale.data.stored.manifest import (
    FEATURE_DTYPES,
    ITEMS_FILE,
    LENGTHS_FILE,
    SHARD_DIGEST,
    save_manifest,
    words_file,
)
from freescale.data.words.id_words import IdWords, read_words
from freescale.errors import DataError
from freescale.jagged import offsets_of

_ROW_GROUP_USERS = 1024
_ROW_GROUP_EVENTS = 1 << 20
_SHARD_BYTES = 64 << 20


class DatasetWriter:
    """Writes histories, in the order they come, as the files of a data set.

    Args:
        folder: an empty folder.
        features: columns to store besides the user.
        min_events: users with fewer events are dropped.
        id_kinds: of users and items; see `columns/ids.py`.
        extra: writes the features of a schema; None where there is none.
    """

    def __init__(
        self,
        folder: Path,
        features: tuple[str, ...],
        min_events: int,
        *,
        id_kinds: IdKinds = MappingProxyType({}),
        extra: FeatureWriter | None = None,
    ) -> None:
        self._folder = folder
        self._features = features
        self._min_events = min_events
        self._dropped_users = 0
        self._lengths: list[IntArray] = []
        self._id_kinds = {role: id_kinds.get(role, "int64") for role in ID_ROLES}
        self._users: list[IntArray] = []
        self._items = ItemCounts(folder)
        self._rest: Events = {}
        self._rest_lengths = np.zeros(0, dtype=np.int64)
        self._shards: list[dict[str, Any]] = []
        self._sink: Any = None
        self._writer: Any = None
        self._digest = hashlib.blake2b(digest_size=8)
        self._extra = extra or FeatureWriter(Schema(), sides={})
        self._has_schema = extra is not None
        lists = [(name, pa.list_(self._extra.event_type(name))) for name in features]
        self._schema = pa.schema([("user", pa.int64()), *lists, *self._extra.user_types])

    def add(self, events: Events, lengths: IntArray | None = None) -> None:
        """Take the sorted events of whole users; `lengths` says how many each row has, where a user has several."""
        if lengths is None:
            starts = np.flatnonzero(np.append(True, events["user"][1:] != events["user"][:-1]))
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
        if self._id_kinds["user"] == "text":
            self._users.append(events["user"][np.cumsum(lengths) - lengths])
        self._items.add(events["item"], lengths)
        # What is left of the last block comes first, so that row groups do not depend on the blocks.
        self._rest = concat_events([self._rest, events]) if self._rest else events
        self._rest_lengths = np.concatenate([self._rest_lengths, lengths])
        self._write_groups(final=False)

    def finish(
        self,
        name: str,
        source_format: str,
        *,
        words: IdWords | None = None,
        about: Mapping[str, Any] = MappingProxyType({}),
        catalogue: tuple[IntArray, IntArray, IntArray] | None = None,
    ) -> dict[str, Any]:
        """Write the rest, the indexes, the words of ids and, last, the manifest, whose fields are returned.

        Args:
            name: of the data set.
            source_format: what it was read from.
            words: of ids that are text.
            about: more fields of the manifest.
            catalogue: ids, counts and counts to train on, where items are not only those of the histories.
        """
        if not self._lengths:
            raise DataError(
                f"No user has {self._min_events} events or more",
                got=f"{self._dropped_users} users with fewer",
                next_step="give more data, or a lower `--min-events`",
            )
        self._write_groups(final=True)
        if self._writer is not None:
            self._close_shard()
        lengths = np.concatenate(self._lengths)
        np.save(self._folder / LENGTHS_FILE, lengths, allow_pickle=False)
        ids, counts, train_counts = self._extra.catalogue(*(catalogue or self._items.merged()))
        write_catalogue(self._folder, ids, counts, train_counts, self._extra.items(ids, train_counts))
        digests: dict[str, str] = {}
        if words is not None:
            users = np.concatenate(self._users) if self._users else np.zeros(0, dtype=np.int64)
            keep: dict[str, IntArray | None] = {"user": users, "item": ids}
            for table in keep:
                if self._extra.is_shared(table):
                    keep[table] = None
            digests = words.write(self._folder, keep)
            self._extra.check_rows(words.num_words)
        usual = [name for name in self._features if name in FEATURE_DTYPES and self._extra.is_usual(name)]
        said = self._extra.check(self._words_of)
        if said:
            about = {**about, "taken": [*about.get("taken", []), *said]}
        manifest = {
            **(self._extra.manifest(usual, digests) if self._has_schema else {}),
            "name": name,
            "source_format": source_format,
            "num_users": len(lengths),
            "num_events": int(lengths.sum()),
            "num_items": len(ids),
            "max_item": int(ids[-1]),
            "features": usual,
            "ids": self._id_kinds,
            "dropped_users": self._dropped_users,
            "catalogue": digest_arrays(ids, counts, train_counts),
            **about,
            "shards": self._shards,
        }
        save_manifest(self._folder, manifest)
        return manifest

    def _words_of(self, owner: str, ids: IntArray) -> list[object]:
        """Ids of users or items as the input has them; their words have been written by now."""
        if self._id_kinds[owner] != "text":
            return ids.tolist()
        return read_words(self._folder / words_file(owner), ids).to_pylist()

    def abort(self) -> None:
        """Let go of a shard that an error left open; it will be deleted."""
        with contextlib.suppress(OSError, pa.ArrowException):
            if self._writer is not None:
                self._close_shard()
            elif self._sink is not None:
                self._sink.close()

    def _write_groups(self, *, final: bool) -> None:
        offsets = offsets_of(self._rest_lengths)
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
        columns: dict[str, Column] = {name: self._rest[name][first:last] for name in self._features}
        users, lengths = self._rest["user"][offsets[:-1]], np.diff(offsets)
        more = self._extra.group(users, lengths, columns) if self._has_schema else {}
        arrays = [
            array for each in (columns, more) for column in each.values() for array in plain_arrays(column)
        ]
        add_arrays(self._digest, users, lengths, *arrays)
        lists = [pa.ListArray.from_arrays(local, to_arrow(column)) for column in columns.values()]
        singles = [to_arrow(column) for column in more.values()]
        table = pa.table([pa.array(users), *lists, *singles], schema=self._schema)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._shards[-1]["row_groups"].append(table.num_rows)
        if self._sink.tell() >= _SHARD_BYTES:
            self._close_shard()

    def _open_shard(self) -> None:
        name = f"shard-{len(self._shards):05d}.parquet"
        self._shards.append({"file": name, "bytes": 0, "row_groups": []})
        self._sink = pa.OSFile(str(self._folder / name), "wb")
        self._digest = hashlib.blake2b(digest_size=8)
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
        shard = self._shards[-1]
        shard["digest"] = self._digest.hexdigest()
        try:
            # In the shard, too: one that was exchanged for another is found without reading it.
            writer.add_key_value_metadata({SHARD_DIGEST: shard["digest"]})
            writer.close()
        finally:
            self._sink.close()
        shard["bytes"] = (self._folder / shard["file"]).stat().st_size


def write_catalogue(
    folder: Path,
    ids: IntArray,
    counts: IntArray,
    train_counts: IntArray,
    features: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """The items that occur, ascending, how often, and where there is a schema what is known of each."""
    catalog = pa.table({"item": ids, "count": counts, "train_count": train_counts, **features})
    pq.write_table(catalog, folder / ITEMS_FILE, compression="zstd")
