"""Batches padded to a few sizes, so that a step can be recorded once for each and replayed.

    tokens     real ones, then pads up to the next of the sizes 1/16 apart: on average 3 % of them
    sequences  real ones, then some without tokens
    rows       the unique rows of the batch, then rows that nothing reads, and one that only pads read

Padding belongs to the batch: it is padded by the thread that makes it ready, whether its step is then recorded,
replayed or computed as usual. Pads have no loss and give exact zeros to every gradient. Everything that the model reads
of a batch, features and lists of tiles alike, travels in one parcel; what is where in it follows from the sizes alone,
so that a copy of one parcel onto another replaces one batch by the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.kernels import LayoutRoom, LayoutWishes, SequenceLayout
from freescale.kernels.runtime import Parcel
from freescale.pipeline.streams import record_stream

Array = npt.NDArray[Any]
_FEWEST = 64
_NOT_SENT = ("item", "target", "negatives")
"""Raw ids; the model reads their indices."""


def padded_size(size: int, *, steps: int = 16) -> int:
    """The next larger of the sizes that lie 1/16 apart, so that at most as much is wasted; the fewest are 64."""
    if size <= _FEWEST:
        return _FEWEST
    step = max(1, (1 << (size - 1).bit_length() - 1) // steps)
    return -(-size // step) * step


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A batch of a fixed size on its device.

    Args:
        batch: its features, padded, with indices into `num_rows` rows.
        layout: where its sequences stand.
        count: [] float64, the tokens of all ranks, which the loss is divided by.
        num_rows: places for unique rows; the last one is for pads.
        real_rows: unique rows there are.
        memory: all of it, as it came.
        num_bytes: of the parcel, which is the first of it.
        key: what all batches have in common whose parcels can take each other's place.
        again: makes the same in other memory of the device.
    """

    batch: SequenceBatch
    layout: SequenceLayout
    count: Tensor
    num_rows: int
    real_rows: int
    memory: tuple[Tensor, ...]
    num_bytes: int
    key: tuple[Any, ...]
    again: Callable[[Tensor], PaddedBatch]

    @property
    def in_one_piece(self) -> bool:
        """Whether all of it is in the parcel, so that it can be copied over another."""
        return len(self.memory) == 1

    def record_stream(self) -> None:
        """This stream uses what another one has copied to the device."""
        for tensor in self.memory:
            record_stream(tensor)


@dataclass(frozen=True, eq=False)
class _Source:
    """A padded batch on the CPU."""

    offsets: Tensor
    tokens: Mapping[str, Array]
    samples: Mapping[str, Array]
    room: LayoutRoom
    num_rows: int
    real_rows: int
    global_tokens: int


class Padder:
    """Pads batches and sends them to their device.

    Args:
        device: where the model computes.
        longest: tokens of the longest sequence there may be.
        table_rows: rows of the item table: no batch has more.
    """

    def __init__(self, device: torch.device, *, longest: int, table_rows: int) -> None:
        self._device, self._longest, self._table_rows = device, longest, table_rows
        self._wishes = LayoutWishes()

    def pad(self, batch: SequenceBatch, inverse: Tensor, *, num_rows: int, global_tokens: int) -> PaddedBatch:
        """The batch padded and on its way to the device.

        Args:
            batch: on the CPU.
            inverse: index of every id among the unique rows, in the order items, targets, negatives.
            num_rows: unique rows.
            global_tokens: of all ranks.
        """
        tokens, samples = padded_size(batch.num_tokens), padded_size(len(batch))
        rows = self._rows_for(num_rows)
        source = _Source(
            _longer(batch.offsets, samples + 1),
            {name: _longer(x.numpy(), tokens) for name, x in batch.tokens.items() if name not in _NOT_SENT},
            {name: _longer(x.numpy(), samples) for name, x in batch.samples.items() if name not in _NOT_SENT},
            LayoutRoom(tokens=tokens, longest=self._longest),
            num_rows=rows,
            real_rows=num_rows,
            global_tokens=global_tokens,
        )
        return self.send(_with_indices(source, batch, inverse.numpy().ravel(), pad=rows - 1))

    def send(self, source: _Source, *, into: Tensor | None = None) -> PaddedBatch:
        """A padded batch on its device, in new memory or in some that is given."""
        room = self._wishes.parcel_bytes if into is None else len(into)
        parcel = Parcel(self._device, room=room, into=into)
        tokens, samples = source.tokens, source.samples
        sent = parcel.add(
            np.array([max(1, source.global_tokens)], np.float64), *tokens.values(), *samples.values()
        )
        layout = SequenceLayout(source.offsets, device=self._device, room=source.room, wishes=self._wishes)
        if self._device.type == "cuda":
            layout.prepare(parcel)
        parcel.send()
        if into is None:
            self._wishes.took(parcel.wanted)
        batch = SequenceBatch(
            source.offsets,
            dict(zip(tokens, sent[1:])),
            dict(zip(samples, sent[1 + len(tokens) :])),
            pads=source.room.tokens - int(source.offsets[-1]),
        )
        return PaddedBatch(
            batch,
            layout,
            sent[0][0],
            num_rows=source.num_rows,
            real_rows=source.real_rows,
            memory=parcel.tensors(),
            num_bytes=parcel.filled,
            key=(source.num_rows, *layout.kernel_choice, *parcel.shapes),
            again=lambda into: self.send(source, into=into),
        )

    def _rows_for(self, num_rows: int) -> int:
        """Places for so many unique rows, and one for pads: all of a small table, else one of few sizes."""
        if 2 * self._table_rows <= 3 * num_rows or self._table_rows < _FEWEST:
            return self._table_rows + 1
        return min(self._table_rows + 1, padded_size(num_rows + 1, steps=4))


def _with_indices(source: _Source, batch: SequenceBatch, inverse: Array, *, pad: int) -> _Source:
    """With indices instead of ids; pads have the row that is theirs."""
    num_tokens, room = batch.num_tokens, source.room.tokens
    tokens = {
        "item_index": _longer(inverse[:num_tokens], room, pad),
        "target_index": _longer(inverse[num_tokens : 2 * num_tokens], room, pad),
        **source.tokens,
    }
    samples = dict(source.samples)
    if (negatives := batch.samples.get("negatives")) is not None:
        index = inverse[2 * num_tokens :].reshape(negatives.shape)
        samples["negative_index"] = _longer(index, len(source.offsets) - 1, pad)
    return _Source(
        source.offsets,
        tokens,
        samples,
        source.room,
        num_rows=source.num_rows,
        real_rows=source.real_rows,
        global_tokens=source.global_tokens,
    )


def _longer(x: Any, size: int, value: int = 0) -> Any:
    """An array, or offsets, with values behind it; offsets go on as they end."""
    if isinstance(x, Tensor):
        return torch.cat([x, x[-1:].expand(size - len(x))])
    out = np.full((size, *x.shape[1:]), value, x.dtype)
    out[: len(x)] = x
    return out
