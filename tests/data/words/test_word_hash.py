"""The hash of words: the same for the same bytes, however they lie in memory, and spread like random numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.words.word_hash import hash_words

MASK = 2**64 - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_hash(word: str) -> int:
    """What the module's docstring says, one word at a time."""
    data, golden = word.encode(), 0x9E3779B97F4A7C15
    blocks = [int.from_bytes(data[at : at + 8], "little") for at in range(0, max(1, len(data)), 8)]
    found = mix((blocks[0] + golden * len(data)) & MASK)
    for block in blocks[1:]:
        found = mix(((found + golden) & MASK) ^ block)
    return found - 2**64 if found >= 2**63 else found


@given(st.lists(st.text(max_size=40)), st.integers(0, 3))
def test_the_hash_is_what_its_words_say(words: list[str], skip: int) -> None:
    for kind in (pa.string(), pa.large_string()):
        column = pa.array(words, type=kind)[skip:]
        assert hash_words(column).tolist() == [plain_hash(word) for word in words[skip:]]


def test_the_hash_never_changes() -> None:
    """Data sets on disk hold these numbers."""
    known = {"": 0, "B000123456": 85506127341925776, "日本": -4970882161911596881}
    assert hash_words(pa.array(list(known))).tolist() == [plain_hash(word) for word in known]
    assert dict(zip(known, hash_words(pa.array(list(known))).tolist())) == known


@pytest.mark.parametrize("form", ["user_{}", "{:012x}-aaaa-bbbb-cccc-{:012x}", "{}/x"])
def test_words_that_differ_little_spread_like_random_numbers(form: str) -> None:
    num = 60_000
    hashes = hash_words(pa.array([form.format(n, n % 97) for n in range(num)]))
    assert len(np.unique(hashes)) == num
    for shift in (0, 16, 32):
        # 60,000 random numbers of 32 bits have 0.4 pairs in expectation; more than 8 in less than 1 of 10^9 tries.
        assert num - len(np.unique((hashes >> shift) & 0xFFFFFFFF)) < 9
    ones = ((hashes[:, None] >> np.arange(64)) & 1).mean(0)
    assert np.abs(ones - 0.5).max() < 0.015
