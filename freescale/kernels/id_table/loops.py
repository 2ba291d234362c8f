"""Compiled CPU loops of the id kernels. Import this module where it is used: loading numba takes half a second.

They go through the ids in the order they stand. Ids are handled in blocks: the slots of a whole block are asked for
before any of them is looked at, so that the waits for memory overlap.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import int32, int64, njit, void
from numpy.typing import NDArray

from freescale.kernels.id_table.layout import EMPTY, GOLDEN, MIX_1, MIX_2

IntArray = NDArray[np.int64]
WordArray = NDArray[np.int32]
Scalar = Any
# Casts inside the loops.
signed: Any = numba.int64
unsigned: Any = numba.uint64
UniTuple: Any = numba.types.UniTuple
INTS, WORDS = int64[::1], int32[::1]
LAYOUT = UniTuple(int64, 6)
BLOCK = 64
GROUP = 8
ONE, EIGHT = np.uint64(1), np.uint64(GROUP)
MODES = {"max": 0, "add": 1, "set": 2}

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_30, _27, _31, _32, _16 = (np.uint64(bits) for bits in (30, 27, 31, 32, 16))
_LOW, _LOW_WORD = np.uint64(0xFFFFFFFF), np.uint64(0xFFFF)


# Helpers have no signatures: they are compiled as part of the loops that call them, and those are kept on disk. With
# signatures each import would compile them again, a second of CPU time.
@njit(inline="always", error_model="numpy")
def _mixed(id_: Scalar) -> Any:
    """What `id_hash` of the layout gives."""
    x = unsigned(id_) + _GOLDEN
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return x ^ (x >> _31)


@njit(inline="always", error_model="numpy")
def _place(id_: Scalar, layout: Any) -> Any:
    """First row of the id's bucket as held here (negative: not here) and the place of its home in it."""
    num_buckets, bucket_rows, bucket_slots, _, first_bucket, held = layout
    x = _mixed(id_)
    bucket = signed(((x >> _32) * unsigned(num_buckets)) >> _32) - first_bucket
    home = signed(((x & _LOW) * unsigned(bucket_slots)) >> _32)
    if bucket < 0 or bucket >= held or id_ == EMPTY:
        return signed(-1), home
    return bucket * bucket_rows, home


@njit(inline="always", error_model="numpy")
def _search(id_: Scalar, base: Scalar, row: Scalar, identity: IntArray, layout: Any) -> Any:
    """Row of an id whose home slot `row` holds another one, or -1."""
    end, left = base + layout[2], layout[3]
    while left > 0:
        stop = min(end, row + left)
        left -= stop - row
        # Most searches end within a few slots. Unsigned, since numba looks at every signed index for a minus sign.
        place, near, last = unsigned(row), unsigned(min(stop, row + GROUP)), unsigned(stop)
        while place < near:
            if identity[place] == id_:
                return signed(place)
            if identity[place] == EMPTY:
                return signed(-1)
            place += ONE
        # The others are long: eight slots by one branch, at the speed of memory and not of guessed branches.
        while place + EIGHT <= last:
            some = False
            for step in range(place, place + EIGHT):
                some |= (identity[step] == id_) | (identity[step] == EMPTY)
            if some:
                break
            place += EIGHT
        while place < last:
            if identity[place] == id_:
                return signed(place)
            if identity[place] == EMPTY:
                return signed(-1)
            place += ONE
        row = base
    return signed(-1)


@njit(inline="always", error_model="numpy")
def _look_ahead(
    ids: IntArray,
    first: Scalar,
    identity: IntArray,
    layout: Any,
    bases: IntArray,
    homes: IntArray,
    keys: IntArray,
) -> None:
    """Buckets and home slots of one block of ids, and who lives there; two short loops keep more loads under way."""
    count = min(BLOCK, len(ids) - first)
    for n in range(count):
        base, home = _place(ids[first + n], layout)
        bases[n] = base
        homes[n] = max(base, signed(0)) + home
    for n in range(count):
        keys[n] = identity[homes[n]]


@njit(void(INTS, INTS, LAYOUT, INTS), cache=True, nogil=True, error_model="numpy")
def find(ids: IntArray, identity: IntArray, layout: Any, rows: IntArray) -> None:
    """rows[n] = row of ids[n], or -1. Reads only."""
    bases, homes, keys = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for first in range(0, len(ids), BLOCK):
        _look_ahead(ids, first, identity, layout, bases, homes, keys)
        for n in range(min(BLOCK, len(ids) - first)):
            id_, key = ids[first + n], keys[n]
            if key == EMPTY or bases[n] < 0:
                rows[first + n] = -1
            elif key == id_:
                rows[first + n] = homes[n]
            else:
                rows[first + n] = _search(id_, bases[n], homes[n], identity, layout)


@njit(int64(INTS, INTS, LAYOUT, INTS, INTS, INTS), cache=True, nogil=True, error_model="numpy")
def claim(
    ids: IntArray, identity: IntArray, layout: Any, rows: IntArray, new_rows: IntArray, new_ids: IntArray
) -> Any:
    """rows[n] = row of ids[n], taken now if need be, or -1 if its window is full; returns how many are new."""
    slots, probe = layout[2], layout[3]
    bases, homes, keys = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    found = signed(0)
    for first in range(0, len(ids), BLOCK):
        _look_ahead(ids, first, identity, layout, bases, homes, keys)
        for n in range(min(BLOCK, len(ids) - first)):
            id_, row = ids[first + n], homes[n]
            end = bases[n] + slots
            left = probe if bases[n] >= 0 else signed(0)
            # Read again: an id of the same block may have come first.
            while left > 0 and identity[row] != id_ and identity[row] != EMPTY:
                row += 1
                left -= 1
                if row == end:
                    row = bases[n]
            if left == 0:
                row = signed(-1)
            elif identity[row] == EMPTY:
                identity[row] = id_
                new_rows[found] = row
                new_ids[found] = id_
                found += 1
            rows[first + n] = row
    return found


@njit(int64(INTS, LAYOUT, int64, INTS), cache=True, nogil=True, error_model="numpy")
def share(ids: IntArray, layout: Any, overflow_rows: Scalar, rows: IntArray) -> Any:
    """rows[n] = the overflow row of ids[n] where it has none (-1 where its bucket is not here); returns how many."""
    num_buckets, bucket_rows, bucket_slots, _, first_bucket, held = layout
    found = signed(0)
    for n in range(len(ids)):
        if rows[n] >= 0:
            continue
        found += 1
        x = _mixed(ids[n])
        bucket = signed(((x >> _32) * unsigned(num_buckets)) >> _32) - first_bucket
        shared = signed((((x >> _16) & _LOW_WORD) * unsigned(overflow_rows)) >> _16)
        if 0 <= bucket < held:
            rows[n] = bucket * bucket_rows + bucket_slots + shared
    return found


@njit(
    void(INTS, INTS, WORDS, INTS, LAYOUT, UniTuple(int64, 4), INTS, INTS),
    cache=True,
    nogil=True,
    error_model="numpy",
)
def evict(
    ids: IntArray,
    identity: IntArray,
    used: WordArray,
    score: IntArray,
    layout: Any,
    rule: Any,
    rows: IntArray,
    gone: IntArray,
) -> None:
    """Ids without a slot, ascending, take over the lowest score of their windows.

    rule: now, safe_from, threshold, blank, as in `id_probe.evict`.
    """
    now, safe_from, threshold, blank = rule
    slots, probe = layout[2], layout[3]
    for n in range(len(ids)):
        rows[n], gone[n] = -1, EMPTY
        base, place = _place(ids[n], layout)
        if base < 0:
            continue
        best, lowest = signed(-1), threshold
        for _ in range(probe):
            row = base + place
            if score[row] < lowest and used[row] < safe_from:
                best, lowest = row, score[row]
            place += 1
            if place == slots:
                place = signed(0)
        if best >= 0:
            rows[n], gone[n] = best, identity[best]
            identity[best], used[best], score[best] = ids[n], now, blank


@njit(void(INTS, WORDS, INTS, INTS, int64, int64), cache=True, nogil=True, error_model="numpy")
def touch(
    rows: IntArray, used: WordArray, score: IntArray, values: IntArray, now: Scalar, mode: Scalar
) -> None:
    """Mark rows as used now and change their scores; mode as in MODES."""
    many = len(values) > 1
    for n in range(len(rows)):
        row = rows[n]
        if row < 0:
            continue
        value = values[n if many else 0]
        if mode == 0:
            score[row] = max(score[row], value)
        elif mode == 2:
            score[row] = value
        elif used[row] != now:
            score[row] += value
        used[row] = now


__all__ = ["MODES", "claim", "evict", "find", "share", "touch"]
