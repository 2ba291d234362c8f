"""From texts to numbers: a vocabulary of words or bytes, and all texts of a catalogue as one jagged array."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.data.source import IntArray
from freescale.jagged import offsets_of, spans

END = 0
"""Ends every text, so that none is without a piece; its state has seen all of it."""
UNKNOWN = 1

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def words_of(text: str) -> list[str]:
    """Lower-case words and numbers, in order."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Vocabulary:
    """Numbers of the pieces of texts.

    Args:
        size: numbers in use, END and UNKNOWN included.
        numbers_of: text -> the numbers of its pieces, without END.
    """

    size: int
    numbers_of: Callable[[str], list[int]]

    @staticmethod
    def of_words(texts: Sequence[str], *, min_count: int = 1) -> Vocabulary:
        """Words that occur in at least `min_count` of the texts, by frequency; the others are UNKNOWN.

        A word of one text only says which item it is: without rows of a table, that is how items are told apart.
        """
        counts = Counter(word for text in texts for word in set(words_of(text)))
        kept = sorted((word for word in counts if counts[word] >= min_count), key=lambda w: (-counts[w], w))
        number = {word: n for n, word in enumerate(kept, start=UNKNOWN + 1)}
        return Vocabulary(
            size=UNKNOWN + 1 + len(kept),
            numbers_of=lambda text: [number.get(word, UNKNOWN) for word in words_of(text)],
        )

    @staticmethod
    def of_bytes() -> Vocabulary:
        """The bytes of the text in UTF-8."""
        return Vocabulary(
            size=UNKNOWN + 1 + 256, numbers_of=lambda text: [UNKNOWN + 1 + b for b in text.encode("utf-8")]
        )


@dataclass(frozen=True)
class NumberedTexts:
    """Texts of a catalogue as numbers, each ended by END.

    Args:
        numbers: of all texts, one after the other.
        offsets: [items + 1] where each starts.
        vocabulary_size: numbers are smaller than this.
    """

    numbers: IntArray
    offsets: IntArray
    vocabulary_size: int

    @staticmethod
    def of(texts: Sequence[str], vocabulary: Vocabulary, *, max_tokens: int) -> NumberedTexts:
        """Number texts; of a long one the first pieces are kept, at most `max_tokens` with END."""
        rows = [[*vocabulary.numbers_of(text)[: max_tokens - 1], END] for text in texts]
        lengths = [len(row) for row in rows]
        return NumberedTexts(
            numbers=np.array([n for row in rows for n in row], dtype=np.int64),
            offsets=offsets_of(lengths),
            vocabulary_size=vocabulary.size,
        )

    def batch(self, items: IntArray) -> SequenceBatch:
        """The texts of the items with these numbers in the catalogue, as feature "token"; "row" is the item."""
        index, offsets = spans(self.offsets[items], np.diff(self.offsets)[items])
        return SequenceBatch(
            offsets=torch.from_numpy(offsets),
            tokens={"token": torch.from_numpy(self.numbers[index])},
            samples={"row": torch.tensor(items, dtype=torch.int64)},
        )

    @cached_property
    def checksum(self) -> int:
        """The same for the same texts and vocabulary."""
        return zlib.crc32(self.offsets.tobytes(), zlib.crc32(self.numbers.tobytes()))
