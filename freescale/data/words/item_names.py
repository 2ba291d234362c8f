"""The user's own ids of items: what stands for the 64-bit ids inside, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.ids import IdKind
from freescale.data.excerpt import excerpt
from freescale.data.source import IntArray, SequenceSource
from freescale.data.words.word_hash import hash_words
from freescale.errors import DataError
from freescale.jagged import find_sorted

ItemId = int | str
_KIND = {
    "int64": "whole numbers of 64 bits",
    "uint64": "whole numbers from 0 to 2^64 - 1",
    "text": "text, as in the training data",
}


class ItemNames:
    """Items of a catalogue by index and by the id the user knows them under.

    Args:
        ids: [m] as they are inside.
        kind: of the user's ids.
        words: [m] Arrow array of text, where they are text.
    """

    def __init__(self, ids: IntArray, kind: IdKind = "int64", words: Any = None) -> None:
        self.ids, self.kind, self.words = ids, kind, words
        # Found by a hash of the word, whoever numbered it: 16 bytes an item, where a dict of words takes 200.
        self._keys = ids if words is None else hash_words(words)
        self._order = np.argsort(self._keys, kind="stable")
        self._sorted = self._keys[self._order]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> ItemId:
        """The user's id of the item at an index."""
        if self.words is not None:
            return self.words[index].as_py()
        return int(self.ids[index]) % 2**64 if self.kind == "uint64" else int(self.ids[index])

    def find(self, items: Sequence[ItemId] | IntArray) -> tuple[npt.NDArray[np.bool_], IntArray]:
        """[n] which of these are in the catalogue, and the indices of those that are."""
        if not len(items) or not len(self):
            return np.zeros(len(items), dtype=bool), np.zeros(0, dtype=np.int64)
        if self.words is None:
            keys = self._numbers(items)
        else:
            asked = self._text(items)
            keys = hash_words(asked)
        place, known = find_sorted(self._sorted, keys)
        index = self._order[place]
        if self.words is not None:
            same = pc.equal(self.words.take(pa.array(index)), asked)
            known &= same.to_numpy(zero_copy_only=False)
        return known, index[known]

    def ids_of(self, items: Sequence[ItemId] | IntArray) -> IntArray:
        """[n] ids as they are inside, of items in the catalogue or not."""
        return self._numbers(items) if self.words is None else hash_words(self._text(items))

    def _numbers(self, items: Sequence[ItemId] | IntArray) -> IntArray:
        unsigned = self.kind == "uint64"
        if isinstance(items, np.ndarray) and items.dtype == (np.uint64 if unsigned else np.int64):
            return items.view(np.int64)
        # numpy makes floats of a list with 2^63 and -1 in it: it is told what to make.
        whole = [isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in items]
        if not all(whole):
            raise self._refused(items[whole.index(False)])
        try:
            keys = np.asarray(items, dtype=np.uint64 if unsigned else np.int64)
        except OverflowError:
            least, most = (0, 2**64) if unsigned else (-(2**63), 2**63)
            bad = next(item for item in items if not least <= int(item) < most)
            raise self._refused(bad) from None
        return keys.view(np.int64)

    def _text(self, items: Sequence[ItemId] | IntArray) -> Any:
        text = [isinstance(item, str) for item in items]
        if not all(text):
            raise self._refused(items[text.index(False)])
        return pa.array([str(item) for item in items], type=pa.large_string())

    def _refused(self, bad: object) -> DataError:
        return DataError(
            f"items must be {'text' if self.kind == 'text' else 'whole numbers'}",
            got=f"{excerpt(repr(bad))} ({type(bad).__name__})",
            allowed=f"the item ids of the training data: {_KIND[self.kind]}",
        )


@runtime_checkable
class NamedSource(Protocol):
    """A source whose items have other ids outside than inside."""

    def item_names(self, ids: IntArray, /) -> ItemNames:
        """The user's own ids of these items."""


def names_of_items(source: SequenceSource, ids: IntArray) -> ItemNames:
    """The user's own ids of items of a source; numbers where it says nothing else."""
    return source.item_names(ids) if isinstance(source, NamedSource) else ItemNames(ids)
