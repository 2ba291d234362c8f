"""Compiled loops that make frames of blocks of bytes, and read them: for `comm/transports/framed.py`.

Import this module where it is used: loading numba takes half a second.
A block is a run of bytes somewhere in a buffer: where it begins and how many they are.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint8, void
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Bytes = NDArray[np.uint8]
INTS, BYTES = int64[::1], uint8[::1]


@njit(void(BYTES, int64, BYTES, int64, int64), nogil=True, cache=True, error_model="numpy")
def _copy(target: Bytes, to: int, source: Bytes, first: int, count: int) -> None:
    # Of views, whose first byte is number 0: then it becomes a copy of many bytes at a time.
    into, out = target[to : to + count], source[first : first + count]
    for at in range(count):
        into[at] = out[at]


@njit(void(BYTES, int64, int64), nogil=True, cache=True, error_model="numpy")
def _write(target: Bytes, to: int, number: int) -> None:
    into = target[to : to + 8]
    for at in range(8):
        into[at] = (number >> (8 * at)) & 255


@njit(int64(BYTES, int64), nogil=True, cache=True, error_model="numpy")
def _read(source: Bytes, first: int) -> np.int64:
    number, out = np.int64(0), source[first : first + 8]
    for at in range(8):
        number |= np.int64(out[at]) << (8 * at)
    return number


@njit(int64(int64), nogil=True, cache=True, error_model="numpy")
def _expected(known: int) -> int:
    """What a message is filled up to: an eighth more than is known, in units of 64 bytes."""
    return (known + known // 8 + 63) // 64 * 64


@njit(int64(int64, int64), nogil=True, cache=True, error_model="numpy")
def _learnt(known: int, size: int) -> int:
    """Larger messages count at once, smaller ones by and by."""
    return max(size, known - (known - size) // 8)


@njit(
    int64(INTS, INTS, int64, int64, INTS, INTS, INTS, INTS, INTS), nogil=True, cache=True, error_model="numpy"
)
def size_frames(
    sizes: IntArray,
    order: IntArray,
    blocks: int,
    own: int,
    known_out: IntArray,
    known_in: IntArray,
    totals: IntArray,
    out: IntArray,
    room: IntArray,
) -> int:
    """Fill in the size of every frame, what is sent of it and what is expected to come; to how many more must follow.

    Args:
        sizes: of blocks, in bytes.
        order: numbers of the blocks, peer after peer.
        blocks: of a peer.
        own: the peer that is this rank itself, whose frame is neither filled up nor cut.
        known_out: sizes of frames to each peer so far, of which it learns the new ones.
        known_in: the same of frames from each peer.
        totals: to be filled in, as the others.
        out: bytes that leave at once.
        room: bytes that come at once.
    """
    beyond = 0
    for peer in range(len(totals)):
        total = 8 * blocks
        for slot in range(blocks):
            total += sizes[order[peer * blocks + slot]]
        totals[peer] = total
        out[peer] = total if peer == own else _expected(known_out[peer])
        room[peer] = total if peer == own else _expected(known_in[peer])
        known_out[peer] = _learnt(known_out[peer], total)
        beyond += total > out[peer]
    return beyond


@njit(void(BYTES, INTS, INTS, INTS, int64, INTS, BYTES), nogil=True, cache=True, error_model="numpy")
def pack_frames(
    source: Bytes,
    begins: IntArray,
    sizes: IntArray,
    order: IntArray,
    blocks: int,
    room: IntArray,
    message: Bytes,
) -> None:
    """Write a frame for every peer: the sizes of its blocks, then the blocks, as far as there is room.

    Args:
        source: holds the blocks.
        begins: of each, in bytes.
        sizes: of each, in bytes.
        order: numbers of the blocks, peer after peer.
        blocks: of a peer.
        room: bytes that each peer gets.
        message: the frames.
    """
    start = 0
    for peer in range(len(room)):
        at, end = start + 8 * blocks, start + room[peer]
        for slot in range(blocks):
            block = order[peer * blocks + slot]
            _write(message, start + 8 * slot, sizes[block])
            count = min(sizes[block], end - at)
            if count > 0:
                _copy(message, at, source, begins[block], count)
                at += count
        start = end


@njit(int64(BYTES, INTS, int64, INTS, INTS, INTS, INTS), nogil=True, cache=True, error_model="numpy")
def read_frames(
    message: Bytes,
    room: IntArray,
    blocks: int,
    begins: IntArray,
    sizes: IntArray,
    totals: IntArray,
    known_in: IntArray,
) -> int:
    """Where the blocks of frames begin and how large they are, and every frame; from how many more will follow."""
    start, late = 0, 0
    for peer in range(len(room)):
        at = start + 8 * blocks
        for slot in range(blocks):
            size = int(_read(message, start + 8 * slot))
            begins[peer * blocks + slot] = at
            sizes[peer * blocks + slot] = size
            at += size
        totals[peer] = at - start
        known_in[peer] = _learnt(known_in[peer], at - start)
        late += at - start > room[peer]
        start += room[peer]
    return late


@njit(void(BYTES, INTS, INTS, INTS, BYTES), nogil=True, cache=True, error_model="numpy")
def join_blocks(source: Bytes, begins: IntArray, sizes: IntArray, order: IntArray, target: Bytes) -> None:
    """Copy blocks one after the other, in this order."""
    at = 0
    for block in order:
        _copy(target, at, source, begins[block], sizes[block])
        at += sizes[block]
