"""Actions: a number an event, such as a rating; or a word such as click, numbered by a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.arrow import NOT_UTF8, NOTHING, NUMBER, cast, is_text, without_nothing
from freescale.errors import DataError

MAX_WORDS = 256

_TRUTHS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
_NUMBERS, _TRUTH, _WORDS = "numbers", "true and false", "words"


class ActionReader:
    """Reads the actions of one input. Whether they are numbers or words is found once, in the first values.

    Args:
        numbers: word -> number, where the user gives them; None numbers words by frequency, the most frequent 0.
    """

    def __init__(self, numbers: Mapping[str, float] | None = None) -> None:
        self._given = dict(numbers) if numbers is not None else None
        self._kind = None if numbers is None else _WORDS
        self._codes: dict[str, int] = {word: code for code, word in enumerate(numbers or ())}
        self._counts = np.zeros(len(self._codes), dtype=np.int64)

    @property
    def allowed(self) -> str:
        """What an action must be, for messages."""
        if self._given is not None:
            return "one of " + ", ".join(self._given)
        if self._kind == _TRUTH:
            return "true or false (yes or no), as the others are"
        if self._kind == _WORDS:
            return "words such as click, as the others are"
        return "finite numbers such as a rating" + (", as the others are" if self._kind else ", or words")

    @property
    def remedy(self) -> str:
        """What helps against an action that is none."""
        return (
            "correct the input, skip such lines (`--bad-lines skip`), name all words with their numbers "
            "(`--actions click=0,buy=1`), or set `--action ''`: no actions"
        )

    def learn(self, column: Any) -> None:
        """Find out what the actions of this input are, if that is not known; bad values do not matter."""
        if self._kind is not None or not is_text(column.type):
            return
        column = without_nothing(column)
        if not len(column):
            return
        texts = pc.utf8_lower(column)
        if 2 * _count(pc.match_substring_regex(column, NUMBER)) >= len(column):
            self._kind = _NUMBERS
        elif 2 * _count(pc.is_in(texts, pa.array(list(_TRUTHS), type=texts.type))) >= len(column):
            self._kind = _TRUTH
        else:
            self._kind = _WORDS

    def read(self, column: Any) -> npt.NDArray[np.float32]:
        """The actions (of words their place in the vocabulary so far), or a ValueError."""
        if is_text(column.type) and self._kind == _TRUTH:
            words = pc.utf8_lower(column).dictionary_encode()
            truths = np.array(
                [_TRUTHS.get(word, np.nan) for word in words.dictionary.to_pylist()], np.float32
            )
            return _finite(truths[words.indices.to_numpy()] if len(column) else truths)
        if self._kind == _WORDS:
            return self._read_words(column)
        with np.errstate(over="ignore"):
            return _finite(cast(column, pa.float64(), safe=False).astype(np.float32))

    def may_be(self, column: Any) -> Any:
        """Of a column of text, which values can be actions at all; finds most bad ones at once."""
        return pc.match_substring_regex(column, NUMBER if self._kind == _NUMBERS else ".")

    def saw(self, actions: npt.NDArray[np.float32]) -> None:
        """Count the words of events that were kept."""
        if self._kind == _WORDS:
            counts = np.bincount(actions.astype(np.int64), minlength=len(self._codes))
            counts[: len(self._counts)] += self._counts
            self._counts = counts

    def vocabulary(self) -> dict[str, float] | None:
        """Word -> number, in the order of the numbers; None where actions are no words."""
        if self._kind != _WORDS:
            return None
        if self._given is not None:
            return dict(sorted(self._given.items(), key=lambda pair: pair[1]))
        counts = {word: int(self._counts[code]) for word, code in self._codes.items()}
        ranked = sorted((word for word in counts if counts[word]), key=lambda word: (-counts[word], word))
        return {word: float(number) for number, word in enumerate(ranked)}

    def numbered(self, actions: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The numbers of the vocabulary in place of what `read` gave; once all events are read."""
        vocabulary = self.vocabulary()
        if vocabulary is None:
            return actions
        numbers = np.array([vocabulary.get(word, np.nan) for word in self._codes], dtype=np.float32)
        return numbers[actions.astype(np.int64)]

    def describe(self) -> str:
        """What the actions were taken for."""
        vocabulary = self.vocabulary()
        if vocabulary is None:
            return "true 1, false 0" if self._kind == _TRUTH else _NUMBERS
        how = "by frequency" if self._given is None else "as asked for"
        return f"words, numbered {how}: " + ", ".join(f"{word} {n:g}" for word, n in vocabulary.items())

    def _read_words(self, column: Any) -> npt.NDArray[np.float32]:
        # Numbers in Parquet may stand for words, where the user says which.
        encoded = column.cast(pa.string()).dictionary_encode()
        words = encoded.dictionary.to_pylist()
        codes = np.array([self._code_of(word) for word in words], dtype=np.float32)
        return _finite(codes[encoded.indices.to_numpy()] if len(column) else codes)

    def _code_of(self, word: str) -> float:
        if word not in self._codes:
            # "4,5" is a number gone wrong, no word.
            no_word = word in NOTHING or NOT_UTF8 in word or not any(letter.isalpha() for letter in word)
            if self._given is not None or no_word:
                return float("nan")
            if len(self._codes) == MAX_WORDS:
                raise DataError(
                    f"The action column has more than {MAX_WORDS} different words",
                    got=", ".join(map(repr, [*list(self._codes)[:4], word])),
                    allowed="a few kinds of events, such as click, cart, purchase",
                    next_step="name the column of the actions (`--action`), or set `--action ''`: no actions",
                )
            self._codes[word] = len(self._codes)
        return float(self._codes[word])


def _finite(actions: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if not np.isfinite(actions).all():
        raise ValueError("not finite")
    return actions


def _count(flags: Any) -> int:
    return int(flags.true_count)
