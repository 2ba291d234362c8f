"""Pieces of different lengths that stand one behind the other in a flat array; and numbers found among ascending ones.

Plain NumPy: plans, data and reports stand on it, and it imports nothing of the house.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
"""Whole numbers of 64 bits."""


def offsets_of(lengths: npt.NDArray[Any] | Sequence[int]) -> Ints:
    """[n + 1] where each of n pieces begins, and last where all end; of flags: how many are set before each."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    return offsets


def spans(starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """Numbers starts[i] .. starts[i] + lengths[i] - 1 of every piece, flat; and the offsets of the pieces."""
    offsets = offsets_of(lengths)
    index = np.arange(offsets[-1])
    # In place: there may be a million of them.
    index += np.repeat(starts - offsets[:-1], lengths)
    return index, offsets


def group_index(counts: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """For groups of these sizes: the group of every member, and its number inside."""
    return np.repeat(np.arange(len(counts)), counts), number_inside(counts)


def number_inside(counts: npt.NDArray[Any]) -> Ints:
    """For groups of these sizes: the number of every member inside its group."""
    offsets = offsets_of(counts)
    number = np.arange(offsets[-1])
    number -= np.repeat(offsets[:-1], counts)
    return number


def find_sorted(among: npt.NDArray[Any], ids: npt.NDArray[Any]) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Where each id stands among ascending ones, and whether it is there at all.

    The index of one that is not there means nothing; it is 0 where there are none to look among.
    """
    if not len(among):
        return np.zeros(np.shape(ids), np.int64), np.zeros(np.shape(ids), bool)
    index = np.searchsorted(among, ids)
    np.minimum(index, len(among) - 1, out=index)
    return index, among[index] == ids
