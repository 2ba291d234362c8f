"""The words of users, items and features: collected while raw input is read, written beside the data set, read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.columns.ids import IdKinds
from freescale.data.preparing.reading.event_columns import WORDS, Events
from freescale.data.source import IntArray
from freescale.data.stored.manifest import damaged, words_file
from freescale.data.words.word_sorter import WordSorter
from freescale.jagged import find_sorted


class IdWords:
    """Keeps the words that the ids of events stand for.

    Args:
        folder: where they are spilled; made when something is, its parent must be there then.
        memory: bytes that the words of one column may take.
        kinds: of the columns of ids.
        tables: where the rows of such a column live; columns that share a table share their words. Else its own name.
    """

    def __init__(
        self,
        folder: Path,
        memory: int,
        kinds: IdKinds,
        tables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._tables = {role: tables.get(role, role) for role, kind in kinds.items() if kind == "text"}
        self._sorters = {
            table: WordSorter(folder / table, memory, what=table)
            for table in dict.fromkeys(self._tables.values())
        }
        self._folder = folder
        self.num_words: dict[str, int] = {}

    def take(self, events: Events, *, key: str | None = None) -> Events:
        """The same events without the columns of words, which are kept here.

        Args:
            events: or the rows of a file of items or users.
            key: whose ids these rows are found by; they are no news, so their words are not kept.
        """
        for role, table in self._tables.items():
            found = events.get(role + WORDS) if role != key else None
            if found is not None:
                self._folder.mkdir(exist_ok=True)
                hashes, words = found if isinstance(found, tuple) else (events[role], found)
                self._sorters[table].add(hashes, words)
        return {name: column for name, column in events.items() if not name.endswith(WORDS)}

    def write(self, folder: Path, ids: Mapping[str, IntArray | None]) -> dict[str, str]:
        """A file for every table of text; returns digests of those of features.

        Args:
            folder: of the data set.
            ids: (ascending) that the data set has in the end, by table; None or not named: all there were.
        """
        digests = {}
        for table, sorter in self._sorters.items():
            file = words_file(table)
            digest = sorter.write(folder / file, ids.get(table))
            self.num_words[table] = sorter.num_written
            if ids.get(table) is None:
                digests[file] = digest
        return digests


def read_ids(path: Path) -> IntArray:
    """All ids of a file of words, ascending."""
    try:
        ids: IntArray = pq.read_table(path, columns=["id"], use_threads=False, partitioning=None)[
            "id"
        ].to_numpy()
    except (OSError, KeyError, pa.ArrowException) as error:
        raise damaged(path, str(error)) from error
    return np.sort(ids)


def read_words(path: Path, ids: IntArray) -> Any:
    """[n] Arrow array of the words of these ids, in their order, from a file of words."""
    found = find_words(path, ids)
    if found.null_count:
        raise damaged(path, "it has no word for an id of the data set")
    return found


def find_words(path: Path, ids: IntArray) -> Any:
    """[n] Arrow array of the words of these ids, in their order, from a file of words; null where it has none."""
    try:
        table = pq.read_table(path, use_threads=False, partitioning=None)
        known, words = table["id"].to_numpy(), table["word"]
    except (OSError, KeyError, pa.ArrowException) as error:
        raise damaged(path, str(error)) from error
    if not len(known):
        return pa.nulls(len(ids), pa.large_string())
    order = np.argsort(known, kind="stable")
    place, there = find_sorted(known[order], ids)
    found = words.take(pa.array(order[place], mask=~there)).cast(pa.large_string())
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
