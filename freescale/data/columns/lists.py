"""Columns of several values: lists of any length, flat with offsets; and what all columns of events can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from freescale.data.schema.vocabulary import NONE
from freescale.data.source import IntArray
from freescale.jagged import number_inside, offsets_of, spans


@dataclass(frozen=True)
class Lists:
    """A list of ids a row; taken apart and put together as an array is.

    Args:
        values: all lists, one behind the other.
        offsets: [n + 1] where each list starts.
    """

    values: IntArray
    offsets: IntArray

    @classmethod
    def of(cls, values: IntArray, lengths: IntArray) -> Lists:
        """Lists of these lengths."""
        return cls(values, offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Memory they take."""
        return self.values.nbytes + self.offsets.nbytes

    @property
    def lengths(self) -> IntArray:
        """Values of each list."""
        return np.diff(self.offsets)

    def __getitem__(self, index: Any) -> Lists:
        """Some of the lists: by a slice, by numbers, or by one truth value each."""
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step == 1:
                last = max(first, last)
                offsets = self.offsets[first : last + 1]
                return Lists(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        rows = np.arange(len(self))[index]
        places, offsets = spans(self.offsets[rows], self.lengths[rows])
        return Lists(self.values[places], offsets)

    def cut(self, width: int) -> Lists:
        """The same, of every list at most the first so many values."""
        lengths = self.lengths
        return Lists.of(self.values[number_inside(lengths) < width], np.minimum(lengths, width))

    def copy(self) -> Lists:
        """Independent of the arrays it was cut from."""
        return Lists(self.values.copy(), self.offsets.copy())

    def padded(self, rows: IntArray, width: int) -> IntArray:
        """[n, width] the lists of these rows, NONE behind their ends; longer ones are cut."""
        starts, lengths = self.offsets[rows], np.minimum(self.offsets[rows + 1] - self.offsets[rows], width)
        inside = np.arange(width) < lengths[:, None]
        out = np.full((len(rows), width), NONE, dtype=np.int64)
        out[inside] = self.values[spans(starts, lengths)[0]]
        return out


Column: TypeAlias = npt.NDArray[Any] | Lists
"""A value a row ([n]), several of one number ([n, width]), or a list of any length."""


def concat_columns(parts: Sequence[Column]) -> Column:
    """One behind the other."""
    if isinstance(parts[0], Lists):
        lists = [part for part in parts if isinstance(part, Lists)]
        lengths = np.concatenate([part.lengths for part in lists])
        return Lists.of(np.concatenate([part.values for part in lists]), lengths)
    return np.concatenate([part for part in parts if not isinstance(part, Lists)])


def bytes_a_row(column: Column) -> int:
    """Memory of a row, on average where they differ."""
    if isinstance(column, Lists) or column.ndim > 1:
        return max(16, column.nbytes // max(1, len(column)))
    return column.itemsize


def to_arrow(column: Column) -> Any:
    """The same as an Arrow array."""
    if isinstance(column, Lists):
        return pa.LargeListArray.from_arrays(pa.array(column.offsets), pa.array(column.values))
    if column.ndim > 1:
        flat = pa.array(np.ascontiguousarray(column).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, column.shape[1])
    return pa.array(column)


def from_arrow(array: Any) -> Column:
    """The column that was written as this Arrow array, without a missing value in it."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
    if pa.types.is_large_list(array.type) or pa.types.is_list(array.type):
        offsets = array.offsets.to_numpy().astype(np.int64)
        return Lists(array.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0])
    if pa.types.is_fixed_size_list(array.type):
        return array.flatten().to_numpy().reshape(len(array), array.type.list_size)
    return array.to_numpy(zero_copy_only=False)


def plain_arrays(column: Column) -> list[npt.NDArray[Any]]:
    """The arrays a column consists of, for digests."""
    return [column.values, column.lengths] if isinstance(column, Lists) else [column]
