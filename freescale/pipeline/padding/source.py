"""What a padded batch is made of before it has a place: features on the CPU, the size to come, the order of its parcel.

Nothing here knows a device, so that loader processes can write parcels (`parcel_loader`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from freescale.data import TokenRule
from freescale.jagged import offsets_of
from freescale.kernels import LayoutRoom
from freescale.kernels.attention import BIAS_ROWS, ListFiller
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


def longer_room(room: LayoutRoom, num_sequences: int, rule: TokenRule) -> LayoutRoom:
    """The room of sequences that grow by tokens of features."""
    times, front = 1 + rule.after, -(-rule.front // BIAS_ROWS)
    places = room.tokens * times + num_sequences * rule.front + 1
    blocks = 0
    if room.blocks:
        # n blocks of a sequence become at most times * n + front; with n (n + 1) / 2 pairs before and all added up.
        more = max(0, times * (2 * front + 1 - times))
        blocks = times**2 * room.blocks + -(-more * room.tiles(num_sequences, BIAS_ROWS) // 2)
        blocks += num_sequences * front * (front + 1) // 2
    longest = rule.front + room.longest * times
    return LayoutRoom(-(-places // FEWEST) * FEWEST, longest, blocks, room.long)


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
    """A batch on the CPU, and the size it is to have.

    Args:
        offsets: where its sequences stand, those without tokens behind the real ones included.
        unique: by table, the numbers of its unique rows.
        tokens: features with a value a token.
        samples: features with a value a sequence.
        room: of its tokens.
        num_rows: by table, places for unique rows.
        global_tokens: what the loss is divided by.
        numbers: of the step.
        items: features with a value a distinct item.
        num_items: places for distinct items.
        rule: how sequences grow by tokens of features; None: they do not.
    """

    offsets: Array
    unique: Mapping[str, Array]
    tokens: list[Feature]
    samples: list[Feature]
    room: LayoutRoom
    num_rows: Mapping[str, int]
    global_tokens: int
    numbers: Array
    items: list[Feature] = field(default_factory=list)
    num_items: int = 0
    rule: TokenRule | None = None

    def padded(self) -> Iterator[tuple[Feature, tuple[int, ...]]]:
        """Unique rows, what the loss is divided by, the step's numbers, all features; each with its padded shape."""
        for name, rows in self.unique.items():
            yield Feature(name, rows), (self.num_rows[name],)
        yield Feature("divisor", np.array([max(1, self.global_tokens)], np.float64)), (1,)
        yield Feature("numbers", self.numbers), self.numbers.shape
        sizes = (
            (self.tokens, self.room.tokens),
            (self.samples, len(self.offsets) - 1),
            (self.items, self.num_items),
        )
        for features, size in sizes:
            for feature in features:
                yield feature, (size, *feature.values.shape[1:])

    @cached_property
    def longer(self) -> tuple[Array, LayoutRoom] | None:
        """Where sequences stand with tokens of features among theirs, and their room: at least one pad is in it."""
        if self.rule is None:
            return None
        sizes = self.rule.tokens(np.diff(self.offsets))
        room = longer_room(self.room, len(sizes), self.rule)
        return offsets_of(sizes), room

    @property
    def size(self) -> tuple[Any, ...]:
        """All that decides how large its tensors are, and which kernels they are computed by."""
        kinds = (
            (f.name, f.values.dtype, f.values.shape[1:]) for f in (*self.tokens, *self.samples, *self.items)
        )
        rows = (*self.num_rows.values(), self.num_items)
        return self.room, len(self.offsets), rows, *kinds

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


Lists = list[tuple[Any, list[tuple[int, ...]]]]


class Template(NamedTuple):
    """How parcels of one size are filled: the lists behind the features, in their order.

    Args:
        key: of batches of this size.
        num_bytes: of their parcels.
        lists: of their sequences.
        longer: of their sequences with tokens of features among theirs.
    """

    key: tuple[Any, ...]
    num_bytes: int
    lists: Lists
    longer: Lists

    def write(self, source: PaddingSource, room: HostRoom) -> None:
        """Write a batch of this size: what its parcel would hold, without any tensor of it."""
        for feature, shape in source.padded():
            values, to = feature.values, room.room_for(shape, feature.values.dtype)
            to[: len(values)] = values
            to[len(values) :] = feature.pad
        self._fill(self.lists, ListFiller(source.offsets, source.room), room)
        if source.longer is not None:
            self._fill(self.longer, ListFiller(*source.longer), room)
        if room.filled != self.num_bytes:
            raise RuntimeError(
                f"a batch that is replayed filled {room.filled:,} bytes of a parcel of {self.num_bytes:,}: "
                "what follows would be read at the wrong place"
            )

    @staticmethod
    def _fill(lists: Lists, filler: ListFiller, room: HostRoom) -> None:
        for wish, shapes in lists:
            filler.fill(wish, [room.room_for(shape, np.int64) for shape in shapes])
