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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.kernels import LayoutRoom, LayoutWishes, SequenceLayout
from freescale.kernels.attention import ListFiller, is_long
from freescale.kernels.runtime import Parcel
from freescale.pipeline.streams import record_stream

Array = npt.NDArray[Any]
_FEWEST = 64
_NOT_SENT = ("item", "target", "negatives")
"""Raw ids; the model reads their indices."""


def padded_size(size: int, *, steps: int = 16, fewest: int = _FEWEST) -> int:
    """The next larger of the sizes that lie 1/16 apart, so that at most as much is wasted."""
    if size <= fewest:
        return fewest
    step = max(1, (1 << (size - 1).bit_length() - 1) // steps)
    return -(-size // step) * step


class _Feature(NamedTuple):
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
class _Source:
    """A batch on the CPU, and the size it is to have."""

    offsets: Tensor
    unique: Array
    tokens: list[_Feature]
    samples: list[_Feature]
    room: LayoutRoom
    num_rows: int
    global_tokens: int

    def padded(self) -> Iterator[tuple[_Feature, tuple[int, ...]]]:
        """Unique rows, the tokens that the loss is divided by, then all features; each with its padded shape."""
        yield _Feature("unique", self.unique), (self.num_rows,)
        yield _Feature("divisor", np.array([max(1, self.global_tokens)], np.float64)), (1,)
        sizes = ((self.tokens, self.room.tokens), (self.samples, len(self.offsets) - 1))
        for features, size in sizes:
            for feature in features:
                yield feature, (size, *feature.values.shape[1:])

    @property
    def size(self) -> tuple[Any, ...]:
        """All that decides how large its tensors are, and which kernels they are computed by."""
        kinds = ((f.name, f.values.dtype, f.values.shape[1:]) for f in (*self.tokens, *self.samples))
        return self.room, len(self.offsets), self.num_rows, is_long(np.diff(self.offsets.numpy())), *kinds


class PaddedViews(NamedTuple):
    """What the model is given of a padded batch.

    Args:
        batch: its features, padded, with indices into rows.
        layout: where its sequences stand.
        divisor: [] float64, the tokens of all ranks, which the loss is divided by.
    """

    batch: SequenceBatch
    layout: SequenceLayout
    divisor: Tensor


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A batch of a fixed size on its device.

    Args:
        memory: all of it, the parcel first.
        num_bytes: of the parcel.
        num_rows: places for unique rows; the last one is for pads.
        real_rows: unique rows there are.
        key: what all batches have in common whose parcels can take each other's place.
        sent: what the model is given, where somebody has asked for it.
        again: makes the same in this or other memory of the device.
        replayed: keys of batches that are replayed, so that nobody asks for their views.
    """

    memory: tuple[Tensor, ...]
    num_bytes: int
    num_rows: int
    real_rows: int
    key: tuple[Any, ...]
    sent: PaddedViews | None
    again: Callable[[Tensor], PaddedBatch]
    replayed: set[tuple[Any, ...]]

    @property
    def unique(self) -> Tensor:
        """[U] the numbers of the unique rows, with which every parcel begins."""
        return self.memory[0][: 8 * self.real_rows].view(torch.int64)

    @property
    def in_one_piece(self) -> bool:
        """Whether all of it is in the parcel, so that it can be copied over another."""
        return len(self.memory) == 1

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
        for tensor in self.memory:
            record_stream(tensor)


class _Template(NamedTuple):
    """How parcels of one size are filled: the lists behind the features, in their order."""

    key: tuple[Any, ...]
    num_bytes: int
    lists: list[tuple[Any, list[tuple[int, ...]]]]


class Padder:
    """Pads batches and sends them to their device.

    Batches are sent with all that the model reads. Where their size is replayed they are only written to where that
    lies: tensors of every feature and list would take longer to make than to fill.

    Args:
        device: where the model computes.
        longest: tokens of the longest sequence there may be.
        table_rows: rows of the item table: no batch has more.
    """

    def __init__(self, device: torch.device, *, longest: int, table_rows: int) -> None:
        self._device, self._longest, self._table_rows = device, longest, table_rows
        self._wishes = LayoutWishes()
        self._templates: dict[tuple[Any, ...], _Template] = {}
        self._replayed: set[tuple[Any, ...]] = set()

    def pad(
        self, batch: SequenceBatch, unique: Tensor, inverse: Tensor, *, global_tokens: int
    ) -> PaddedBatch:
        """The batch padded and on its way to the device.

        Args:
            batch: on the CPU.
            unique: [U] numbers of its unique rows.
            inverse: index of every id among them, in the order items, targets, negatives.
            global_tokens: of all ranks.
        """
        source = self._source(batch, unique.numpy(), inverse.numpy().ravel(), global_tokens)
        template = self._templates.get((self._wishes.count, *source.size))
        if template is None or template.key not in self._replayed:
            return self.send(source)
        return self._write(source, template)

    def send(self, source: _Source, *, into: Tensor | None = None) -> PaddedBatch:
        """A padded batch on its device with all that the model reads, in new memory or in some that is given."""
        noted = self._wishes.count
        room = len(into) if into is not None else self._wishes.parcel_bytes + 8 * source.num_rows
        parcel = Parcel(self._device, room=room, into=into)
        sent = [parcel.add(_longer(feature, shape))[0] for feature, shape in source.padded()]
        layout = SequenceLayout(source.offsets, device=self._device, room=source.room, wishes=self._wishes)
        layout.prepare(parcel)
        parcel.send()
        if into is None:
            self._wishes.took(parcel.wanted)
        names = [feature.name for feature, _ in source.padded()]
        first, last = 2, 2 + len(source.tokens)
        views = PaddedViews(
            SequenceBatch(
                source.offsets,
                dict(zip(names[first:last], sent[first:last])),
                dict(zip(names[last:], sent[last:])),
                pads=source.room.tokens - int(source.offsets[-1]),
            ),
            layout,
            sent[1][0],
        )
        made = self._made(source, parcel, (source.num_rows, *layout.kernel_choice, *parcel.shapes), views)
        if made.in_one_piece and noted:
            lists = parcel.filled_in
            self._templates[noted, *source.size] = _Template(made.key, parcel.filled, lists)
        return made

    def _write(self, source: _Source, template: _Template) -> PaddedBatch:
        """The same parcel without any tensor of what is in it."""
        parcel = Parcel(self._device, room=template.num_bytes)
        for feature, shape in source.padded():
            values, to = feature.values, parcel.room_for(shape, feature.values.dtype)
            to[: len(values)] = values
            to[len(values) :] = feature.pad
        filler = ListFiller(source.offsets.numpy(), source.room)
        for wish, shapes in template.lists:
            filler.fill(wish, [parcel.room_for(shape, np.int64) for shape in shapes])
        assert parcel.filled == template.num_bytes
        parcel.send()
        return self._made(source, parcel, template.key, None)

    def _made(
        self, source: _Source, parcel: Parcel, key: tuple[Any, ...], views: PaddedViews | None
    ) -> PaddedBatch:
        return PaddedBatch(
            parcel.tensors(),
            parcel.filled,
            num_rows=source.num_rows,
            real_rows=len(source.unique),
            key=key,
            sent=views,
            again=lambda into: self.send(source, into=into),
            replayed=self._replayed,
        )

    def _source(self, batch: SequenceBatch, unique: Array, inverse: Array, global_tokens: int) -> _Source:
        num_tokens, num_samples = padded_size(batch.num_tokens), padded_size(len(batch), fewest=8)
        rows = self._rows_for(len(unique))
        item, target, negative = np.split(inverse, [batch.num_tokens, 2 * batch.num_tokens])
        tokens = [_Feature("item_index", item, rows - 1), _Feature("target_index", target, rows - 1)]
        tokens += [_Feature(name, x.numpy()) for name, x in batch.tokens.items() if name not in _NOT_SENT]
        samples = [_Feature(name, x.numpy()) for name, x in batch.samples.items() if name not in _NOT_SENT]
        if (ids := batch.samples.get("negatives")) is not None:
            samples.append(_Feature("negative_index", negative.reshape(ids.shape), rows - 1))
        return _Source(
            torch.cat([batch.offsets, batch.offsets[-1:].expand(num_samples - len(batch))]),
            unique,
            tokens,
            samples,
            LayoutRoom(tokens=num_tokens, longest=self._longest),
            num_rows=rows,
            global_tokens=global_tokens,
        )

    def _rows_for(self, num_rows: int) -> int:
        """Places for so many unique rows, and one for pads: all of a small table, else one of few sizes."""
        if 2 * self._table_rows <= 3 * num_rows or self._table_rows < _FEWEST:
            return self._table_rows + 1
        return min(self._table_rows + 1, padded_size(num_rows + 1, steps=4))


def _longer(feature: _Feature, shape: tuple[int, ...]) -> Array:
    out = np.full(shape, feature.pad, feature.values.dtype)
    out[: len(feature.values)] = feature.values
    return out
