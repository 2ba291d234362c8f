"""PaddedBatch: a batch of a fixed size on its device, in one piece of memory that another's can take the place of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.pipeline.padding.step_numbers import StepNumbers
from freescale.pipeline.streams import record_stream


def rows_in_parcel(
    content: Tensor, num_rows: Mapping[str, int], real_rows: Mapping[str, int]
) -> dict[str, Tensor]:
    """By table, [U] the numbers of the unique rows, with which every parcel begins."""
    found, begin = {}, 0
    for name, places in num_rows.items():
        found[name] = content[begin : begin + 8 * real_rows[name]].view(torch.int64)
        begin += 8 * (places + places % 2)  # each begins on 16 bytes
    return found


class PaddedViews(NamedTuple):
    """What the model is given of a padded batch.

    Args:
        batch: its features, padded, with indices into rows.
        layout: where its sequences stand, alone and with tokens of features among theirs.
        divisor: [] float64, the tokens of all ranks, which the loss is divided by.
        unique: by table, [rows] the numbers of the unique rows, then zeros.
        numbers: of the step.
    """

    batch: SequenceBatch
    layout: SequenceLayout
    divisor: Tensor
    unique: Mapping[str, Tensor]
    numbers: StepNumbers


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A batch of a fixed size on its device.

    Args:
        memory: all of it, the parcel first.
        num_bytes: of the parcel.
        num_rows: by table, places for unique rows; the last one is for pads.
        real_rows: by table, unique rows there are.
        key: what all batches have in common whose parcels can take each other's place.
        sent: what the model is given, where somebody has asked for it.
        again: makes the same in this or other memory of the device.
        replayed: keys of batches that are replayed, so that nobody asks for their views.
        foreseen: makes batches of all sizes that are foreseen, out of this one, to be recorded before others come;
            None where its own size is not among them.
        rest: the other micro-batches of its step.
        fixed: whether the sizes of all its lists follow from its own; else it takes the place of no other.
    """

    memory: tuple[Tensor, ...]
    num_bytes: int
    num_rows: Mapping[str, int]
    real_rows: Mapping[str, int]
    key: tuple[Any, ...]
    sent: PaddedViews | None
    again: Callable[[Tensor], PaddedBatch]
    replayed: set[tuple[Any, ...]]
    foreseen: Callable[[], Iterator[PaddedBatch]] | None = None
    rest: tuple[PaddedBatch, ...] = ()
    fixed: bool = True

    @property
    def parts(self) -> tuple[PaddedBatch, ...]:
        """The micro-batches of the step; it alone where steps have one."""
        return self, *self.rest

    @property
    def unique(self) -> dict[str, Tensor]:
        """By table, [U] the numbers of the unique rows."""
        return rows_in_parcel(self.memory[0], self.num_rows, self.real_rows)

    @property
    def num_tokens(self) -> int:
        """Places for tokens, those of features among them."""
        _, *longer = self.key[0][len(self.num_rows) :]
        return int(longer[0] if longer else self.key[1])

    @property
    def in_one_piece(self) -> bool:
        """Whether all of it is in the parcel, so that it can be copied over another."""
        return len(self.memory) == 1

    @property
    def copyable(self) -> bool:
        """Whether it can be copied over another batch of its key."""
        return self.in_one_piece and self.fixed

    @cached_property
    def views(self) -> PaddedViews:
        """What the model is given; made now where a replay was expected, which needs none of it."""
        if self.sent is not None:
            return self.sent
        sent = self.again(self.memory[0]).sent
        assert sent is not None
        return sent

    def record_stream(self) -> None:
        """This stream uses what another one has copied to the device."""
        for part in self.parts:
            for tensor in part.memory:
                record_stream(tensor)
