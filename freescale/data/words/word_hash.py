"""A 64-bit hash of words, over a whole Arrow column at once.

    h = mix64((8 bytes of the word, little-endian, zeros behind its end) + GOLDEN * length)
    h = mix64(h + GOLDEN ^ the next 8 bytes), for each 8 bytes that follow

The same on every machine, and no part of the promise to others: words stand beside their hashes, so whoever writes a
data set may number them as he likes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from freescale.data.negatives import mix64
from freescale.data.source import IntArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEP = 8
# Keeps the first n of 8 bytes, n = 0 .. 8.
_KEEP = np.array([(1 << (8 * n)) - 1 for n in range(_STEP + 1)], dtype=np.uint64)


def hash_words(words: Any) -> IntArray:
    """[n] the hash of every word of an Arrow array of text without nulls."""
    starts, lengths, data = _bytes_of(words)
    # A word is read 8 bytes at a time from wherever it starts: one number for every byte there is.
    every = np.ndarray((len(data) - _STEP + 1,), dtype="<u8", buffer=data, strides=(1,))
    with np.errstate(over="ignore"):
        first = every[starts] & _KEEP[np.minimum(lengths, _STEP)]
        hashes = mix64(first + _GOLDEN * lengths.astype(np.uint64))
        longer = np.flatnonzero(lengths > _STEP)
        done = _STEP
        while len(longer):
            left = np.minimum(lengths[longer] - done, _STEP)
            block = every[starts[longer] + done] & _KEEP[left]
            hashes[longer] = mix64((hashes[longer] + _GOLDEN) ^ block)
            done += _STEP
            longer = longer[lengths[longer] > done]
    return hashes.view(np.int64)


def _bytes_of(words: Any) -> tuple[IntArray, IntArray, npt.NDArray[np.uint8]]:
    """Where each word starts, how long it is, and the bytes of all, with 8 more behind the last."""
    offset_type = np.int64 if pa.types.is_large_string(words.type) else np.int32
    _, offset_buffer, data_buffer = words.buffers()
    if offset_buffer is None or not len(words):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(_STEP, np.uint8)
    offsets = np.frombuffer(offset_buffer, dtype=offset_type)[words.offset : words.offset + len(words) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.zeros(last - first + _STEP, dtype=np.uint8)
    if last > first:
        data[: last - first] = np.frombuffer(data_buffer, dtype=np.uint8, count=last - first, offset=first)
    starts = offsets[:-1].astype(np.int64) - first
    return starts, np.diff(offsets).astype(np.int64), data
