"""The words of users and items: collected while raw input is read, written beside the data set, read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.columns.ids import WORDS, IdKinds
from freescale.data.event_columns import Events
from freescale.data.manifest import WORD_FILES, damaged
from freescale.data.source import IntArray
from freescale.data.words.word_sorter import WordSorter


class IdWords:
    """Keeps the words that the ids of events stand for.

    Args:
        folder: where they are spilled; made when something is, its parent must be there then.
        memory: bytes that the words of one column may take.
        kinds: of the columns of ids.
    """

    def __init__(self, folder: Path, memory: int, kinds: IdKinds) -> None:
        self._sorters = {
            role: WordSorter(folder / role, memory, what=role)
            for role, kind in kinds.items()
            if kind == "text"
        }
        self._folder = folder

    def take(self, events: Events) -> Events:
        """The same events without the columns of words, which are kept here."""
        for role, sorter in self._sorters.items():
            self._folder.mkdir(exist_ok=True)
            sorter.add(events[role], events[role + WORDS])
        return {name: column for name, column in events.items() if not name.endswith(WORDS)}

    def write(self, folder: Path, ids: Mapping[str, IntArray]) -> None:
        """A file for every column of text; the words of ids (ascending) that the data set has in the end."""
        for role, sorter in self._sorters.items():
            sorter.write(folder / WORD_FILES[role], ids[role])


def read_words(path: Path, ids: IntArray) -> Any:
    """[n] Arrow array of the words of these ids, in their order, from a file of words."""
    try:
        table = pq.read_table(path, use_threads=False, partitioning=None)
        known, words = table["id"].to_numpy(), table["word"]
    except (OSError, KeyError, pa.ArrowException) as error:
        raise damaged(path, str(error)) from error
    order = np.argsort(known, kind="stable")
    place = np.searchsorted(known, ids, sorter=order).clip(max=max(0, len(known) - 1))
    if len(ids) and (not len(known) or (known[order[place]] != ids).any()):
        raise damaged(path, "it has no word for an id of the data set")
    found = words.take(pa.array(order[place])).cast(pa.large_string())
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
