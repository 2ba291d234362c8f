"""What a padded batch is made of before it has a place: features on the CPU, the size to come, the order of its parcel.

Nothing here knows a device, so that loader processes can write parcels (`parcel_loader`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from freescale.kernels import LayoutRoom
from freescale.kernels.attention import ListFiller, is_long
from freescale.kernels.runtime import HostRoom

Array = npt.NDArray[Any]
FEWEST = 64
"""The smallest size."""


def padded_size(size: int, *, steps: int = 16, fewest: int = FEWEST) -> int:
    """The next larger of the sizes that lie 1/16 apart, so that at most as much is wasted."""
    if size <= fewest:
        return fewest
    step = max(1, (1 << (size - 1).bit_length() - 1) // steps)
    return -(-size // step) * step


class Feature(NamedTuple):
    """Values of a batch before it is padded.

    Args:
        name: of the feature.
        values: of real tokens or sequences.
        pad: what stands behind them.
    """

    name: str
    values: Array
    pad: int = 0


@dataclass(frozen=True, eq=False)
class PaddingSource:
    """A batch on the CPU, and the size it is to have."""

    offsets: Array
    unique: Array
    tokens: list[Feature]
    samples: list[Feature]
    room: LayoutRoom
    num_rows: int
    global_tokens: int
    numbers: Array

    def padded(self) -> Iterator[tuple[Feature, tuple[int, ...]]]:
        """Unique rows, what the loss is divided by, the step's numbers, all features; each with its padded shape."""
        yield Feature("unique", self.unique), (self.num_rows,)
        yield Feature("divisor", np.array([max(1, self.global_tokens)], np.float64)), (1,)
        yield Feature("numbers", self.numbers), self.numbers.shape
        sizes = ((self.tokens, self.room.tokens), (self.samples, len(self.offsets) - 1))
        for features, size in sizes:
            for feature in features:
                yield feature, (size, *feature.values.shape[1:])

    @property
    def size(self) -> tuple[Any, ...]:
        """All that decides how large its tensors are, and which kernels they are computed by."""
        kinds = ((f.name, f.values.dtype, f.values.shape[1:]) for f in (*self.tokens, *self.samples))
        return self.room, len(self.offsets), self.num_rows, is_long(np.diff(self.offsets)), *kinds

    def cut(self, num_tokens: int) -> PaddingSource:
        """As much of the batch as fits into places for so many tokens: whole sequences, then some without tokens."""
        fitting = int(np.searchsorted(self.offsets, num_tokens, side="right")) - 1
        end = int(self.offsets[fitting])
        return replace(
            self,
            offsets=np.minimum(self.offsets, end),
            tokens=[feature._replace(values=feature.values[:end]) for feature in self.tokens],
            room=self.room._replace(tokens=num_tokens),
        )


class Template(NamedTuple):
    """How parcels of one size are filled: the lists behind the features, in their order."""

    key: tuple[Any, ...]
    num_bytes: int
    lists: list[tuple[Any, list[tuple[int, ...]]]]

    def write(self, source: PaddingSource, room: HostRoom) -> None:
        """Write a batch of this size: what its parcel would hold, without any tensor of it."""
        for feature, shape in source.padded():
            values, to = feature.values, room.room_for(shape, feature.values.dtype)
            to[: len(values)] = values
            to[len(values) :] = feature.pad
        filler = ListFiller(source.offsets, source.room)
        for wish, shapes in self.lists:
            filler.fill(wish, [room.room_for(shape, np.int64) for shape in shapes])
        assert room.filled == self.num_bytes
