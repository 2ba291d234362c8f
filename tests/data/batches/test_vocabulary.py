"""Texts as numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.batches.vocabulary import END, UNKNOWN, NumberedTexts, Vocabulary, words_of
from tests.effort import examples

TEXTS = ["Toy Story (1995)\nChildren's|Comedy", "Story of us (1999)\nComedy", "", "comedy comedy only_here"]


def test_words_are_lower_case_with_numbers_and_apostrophes():
    assert words_of(TEXTS[0]) == ["toy", "story", "1995", "children's", "comedy"]
    assert words_of("Amélie's_X — 12") == ["amélie's", "x", "12"]


def test_words_of_at_least_two_texts_have_numbers_by_frequency_then_name():
    vocabulary = Vocabulary.of_words(TEXTS, min_count=2)
    assert vocabulary.size == 4
    # comedy: three texts; story: two; a word twice in one text counts once.
    assert vocabulary.numbers_of("Comedy story toy") == [2, 3, UNKNOWN]
    assert Vocabulary.of_words(TEXTS).size == 2 + 10
    assert Vocabulary.of_words(["b a", "a b"]).numbers_of("a b") == [2, 3]


def test_every_text_ends_and_long_ones_are_cut():
    texts = NumberedTexts.of(TEXTS, Vocabulary.of_words(TEXTS, min_count=2), max_tokens=4)
    assert np.diff(texts.offsets).tolist() == [4, 4, 1, 4]
    assert texts.numbers[texts.offsets[1:] - 1].tolist() == [END] * 4
    assert texts.numbers[:4].tolist() == [UNKNOWN, 3, UNKNOWN, END]


def test_the_checksum_tells_texts_apart():
    vocabulary = Vocabulary.of_words(TEXTS)
    first, again = (NumberedTexts.of(TEXTS, vocabulary, max_tokens=9).checksum for _ in range(2))
    assert first == again
    assert first != NumberedTexts.of(TEXTS[::-1], vocabulary, max_tokens=9).checksum


@examples(17, thorough=200)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=6), st.integers(2, 20), st.data())
def test_a_batch_holds_the_texts_asked_for(texts, max_tokens, data):
    vocabulary = Vocabulary.of_bytes()
    group_index = NumberedTexts.of(texts, vocabulary, max_tokens=max_tokens)
    items = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=8))
    batch = group_index.batch(np.array(items, dtype=np.int64))
    rows = [part.tolist() for part in batch.tokens["token"].split(batch.lengths.tolist())] if items else []
    for item, row in zip(items, rows, strict=True):
        raw = texts[item].encode()[: max_tokens - 1]
        assert row == [*(b + 2 for b in raw), END]
        assert max(row) < vocabulary.size
