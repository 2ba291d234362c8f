"""What the ids of a table stand for in the input: numbers, or words that only some sources know."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from freescale.data.columns.ids import IdKind, IdKinds
from freescale.data.source import IntArray, SequenceSource
from freescale.data.words.word_hash import hash_words
from freescale.errors import DataError


@runtime_checkable
class TextSource(Protocol):
    """A source that knows which ids are text."""

    @property
    def table_kinds(self) -> IdKinds:
        """Of the ids of every table; whole numbers of 64 bits where it is not named."""

    def find_words(self, table: str, ids: IntArray, /) -> Any:
        """[n] Arrow array of what stands in the input for ids of a table of text; null where that is not known."""


def table_kinds(source: SequenceSource) -> dict[str, IdKind]:
    """The kind of ids of every table; whole numbers of 64 bits where it is not named."""
    return dict(source.table_kinds) if isinstance(source, TextSource) else {}


def table_words(source: SequenceSource, table: str, ids: IntArray) -> Any:
    """[n] Arrow array of the words of ids of a table, null where one is not known; None where they are no words."""
    if table_kinds(source).get(table) != "text" or not isinstance(source, TextSource):
        return None
    words = source.find_words(table, ids)
    # A service has the word alone and finds its row by the hash.
    known = np.flatnonzero(words.is_valid().to_numpy(zero_copy_only=False))
    if not np.array_equal(hash_words(words.take(known)), ids[known]):
        raise DataError(
            f"the ids of table {table} are not the hashes of their words, so words of requests cannot be found",
            next_step="prepare the data set with `freescale prepare`, which numbers words by their hash",
        )
    return words
