"""Batches padded to a few sizes, so that a step can be recorded once for each and replayed.

    tokens     real ones, then pads up to the next of a few sizes (`sizes.py`)
    sequences  real ones, then some without tokens
    rows       the unique rows of the batch, then rows that nothing reads, and one that only pads read

Padding belongs to the batch: it is padded by the thread that makes it ready, whether its step is then recorded,
replayed or computed as usual. Pads have no loss and give exact zeros to every gradient. Everything that the model reads
of a batch, features and lists of tiles alike, travels in one parcel; what is where in it follows from the sizes alone,
so that a copy of one parcel onto another replaces one batch by the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.kernels import LayoutRoom, LayoutWishes, SequenceLayout
from freescale.kernels.runtime import Parcel
from freescale.pipeline.ids.batch_ids import with_indices
from freescale.pipeline.padding.sizes import UNFORESEEN, PaddingSizes
from freescale.pipeline.padding.source import Feature, PaddingSource, Template
from freescale.pipeline.padding.step_numbers import StepNumbers, no_numbers
from freescale.pipeline.streams import record_stream

Array = npt.NDArray[Any]
_NOT_SENT = ("item", "target", "negatives")
"""Raw ids; the model reads their indices."""
_INDICES = ("item_index", "target_index", "negative_index")


class PaddedViews(NamedTuple):
    """What the model is given of a padded batch.

    Args:
        batch: its features, padded, with indices into rows.
        layout: where its sequences stand.
        divisor: [] float64, the tokens of all ranks, which the loss is divided by.
        unique: [rows] the numbers of the unique rows, then zeros.
        numbers: of the step.
    """

    batch: SequenceBatch
    layout: SequenceLayout
    divisor: Tensor
    unique: Tensor
    numbers: StepNumbers


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
        foreseen: makes batches of all sizes that are foreseen, out of this one, to be recorded before others come;
            None where its own size is not among them.
        rest: the other micro-batches of its step.
    """

    memory: tuple[Tensor, ...]
    num_bytes: int
    num_rows: int
    real_rows: int
    key: tuple[Any, ...]
    sent: PaddedViews | None
    again: Callable[[Tensor], PaddedBatch]
    replayed: set[tuple[Any, ...]]
    foreseen: Callable[[], Iterator[PaddedBatch]] | None = None
    rest: tuple[PaddedBatch, ...] = ()

    @property
    def parts(self) -> tuple[PaddedBatch, ...]:
        """The micro-batches of the step; it alone where steps have one."""
        return self, *self.rest

    @property
    def unique(self) -> Tensor:
        """[U] the numbers of the unique rows, with which every parcel begins."""
        return self.memory[0][: 8 * self.real_rows].view(torch.int64)

    @property
    def num_tokens(self) -> int:
        """Places for tokens."""
        return int(self.key[1])

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
        for part in self.parts:
            for tensor in part.memory:
                record_stream(tensor)


class Padder:
    """Pads batches and sends them to their device.

    Batches are sent with all that the model reads. Where their size is replayed they are only written to where that
    lies: tensors of every feature and list would take longer to make than to fill.

    Args:
        device: where the model computes.
        longest: tokens of the longest sequence there may be.
        table_rows: rows of the item table: no batch has more.
        numbers_of: step -> its numbers (`pack_numbers`).
        sizes: that batches are padded to.
        num_parts: micro-batches a step; all have the rows of the step.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        longest: int,
        table_rows: int,
        numbers_of: Callable[[int], Array] = no_numbers,
        sizes: PaddingSizes = UNFORESEEN,
        num_parts: int = 1,
    ) -> None:
        self._numbers_of, self._sizes, self._num_parts = numbers_of, sizes, num_parts
        self._device, self._longest, self._table_rows = device, longest, table_rows
        self._wishes = LayoutWishes()
        self._templates: dict[tuple[Any, ...], Template] = {}
        self._replayed: set[tuple[Any, ...]] = set()
        self._useful: tuple[tuple[int, int], dict[tuple[Any, ...], Template]] = ((0, 0), {})

    def pad(
        self, batch: SequenceBatch, unique: Tensor, inverse: Tensor, *, global_tokens: int, step: int = 0
    ) -> PaddedBatch:
        """The batch padded and on its way to the device.

        Args:
            batch: on the CPU.
            unique: [U] numbers of its unique rows.
            inverse: index of every id among them, in the order items, targets, negatives.
            global_tokens: of all ranks.
            step: counted from 0.
        """
        indexed = with_indices(batch, inverse)
        parts = indexed.split(self._num_parts) if self._num_parts > 1 else [indexed]
        first, *rest = (
            self.pad_source(self._source(part, unique, global_tokens=global_tokens, step=step))
            for part in parts
        )
        return replace(first, rest=tuple(rest)) if rest else first

    def pad_source(self, source: PaddingSource) -> PaddedBatch:
        """The same of a batch whose size is known."""
        template = self._templates.get((self._wishes.count, *source.size))
        if template is None or template.key not in self._replayed:
            return self.send(source)
        return self._write(source, template)

    def send(self, source: PaddingSource, *, into: Tensor | None = None) -> PaddedBatch:
        """A padded batch on its device with all that the model reads, in new memory or in some that is given."""
        noted = self._wishes.count
        room = len(into) if into is not None else self._wishes.parcel_bytes + 8 * source.num_rows
        parcel = Parcel(self._device, room=room, into=into)
        sent = [parcel.add(_longer(feature, shape))[0] for feature, shape in source.padded()]
        offsets = torch.from_numpy(source.offsets)
        layout = SequenceLayout(offsets, device=self._device, room=source.room, wishes=self._wishes)
        layout.prepare(parcel)
        parcel.send()
        if into is None:
            self._wishes.took(parcel.wanted)
        names = [feature.name for feature, _ in source.padded()]
        first, last = 3, 3 + len(source.tokens)
        views = PaddedViews(
            SequenceBatch(
                offsets,
                dict(zip(names[first:last], sent[first:last])),
                dict(zip(names[last:], sent[last:])),
                pads=source.room.tokens - int(source.offsets[-1]),
            ),
            layout,
            sent[1][0],
            sent[0],
            StepNumbers.of(sent[2]),
        )
        made = self._made(source, parcel, (source.num_rows, *layout.kernel_choice, *parcel.shapes), views)
        if made.in_one_piece and noted:
            lists = parcel.filled_in
            self._templates[noted, *source.size] = Template(made.key, parcel.filled, lists)
        return made

    def foreseen(self, source: PaddingSource) -> Iterator[PaddedBatch]:
        """Batches of all sizes that are foreseen, with as much of this one as they hold; the largest comes first."""
        for num_tokens in reversed(self._sizes.tokens):
            made = self.send(source.cut(num_tokens))
            # The first of a larger size may have found too little room, and left word of what it takes.
            yield made if made.in_one_piece else self.send(source.cut(num_tokens))

    def _write(self, source: PaddingSource, template: Template) -> PaddedBatch:
        """The same parcel without any tensor of what is in it."""
        parcel = Parcel(self._device, room=template.num_bytes)
        template.write(source, parcel)
        parcel.send()
        return self._made(source, parcel, template.key, None)

    def written(self, content: Tensor, template: Template, *, num_rows: int, real_rows: int) -> PaddedBatch:
        """A batch of a size that is replayed, whose parcel another process has written; may be overwritten after."""
        host = torch.empty(template.num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        host.copy_(content[: template.num_bytes])
        memory = host.to(self._device, non_blocking=True)

        def again(into: Tensor) -> PaddedBatch:
            raise AssertionError("a size that is replayed is not computed as usual")

        return PaddedBatch(
            (memory,), template.num_bytes, num_rows, real_rows, template.key, None, again, self._replayed
        )

    def templates(self) -> dict[tuple[Any, ...], Template]:
        """By the size of a batch, how it is written where it is replayed; for one thread that asks again and again."""
        counts = len(self._templates), len(self._replayed)
        if self._useful[0] != counts:
            known = list(self._templates.items())  # at once: another thread may add some
            useful = {tuple(size): each for (_, *size), each in known if each.key in self._replayed}
            self._useful = (counts, useful)
        return self._useful[1]

    def _made(
        self, source: PaddingSource, parcel: Parcel, key: tuple[Any, ...], views: PaddedViews | None
    ) -> PaddedBatch:
        tokens, samples = source.room.tokens, len(source.offsets) - 1
        foreseen = self._sizes.holds(tokens=tokens, samples=samples, rows=source.num_rows)
        return PaddedBatch(
            parcel.tensors(),
            parcel.filled,
            num_rows=source.num_rows,
            real_rows=len(source.unique),
            key=key,
            sent=views,
            again=lambda into: self.send(source, into=into),
            replayed=self._replayed,
            foreseen=partial(self.foreseen, source) if foreseen else None,
        )

    def source(
        self, batch: SequenceBatch, unique: Tensor, inverse: Tensor, *, global_tokens: int, step: int = 0
    ) -> PaddingSource:
        """A batch and the size it is to have, for steps of one part; the arguments are those of `pad`."""
        return self._source(with_indices(batch, inverse), unique, global_tokens=global_tokens, step=step)

    def _source(
        self, batch: SequenceBatch, unique: Tensor, *, global_tokens: int, step: int
    ) -> PaddingSource:
        """The same of a batch with indices instead of ids."""
        num_tokens, num_samples = (
            self._sizes.tokens_for(batch.num_tokens),
            self._sizes.samples_for(len(batch)),
        )
        rows = self._sizes.rows_for(len(unique), table_rows=self._table_rows)
        tokens, samples = (
            [
                Feature(name, x.numpy(), rows - 1 if name in _INDICES else 0)
                for name, x in features.items()
                if name not in _NOT_SENT
            ]
            for features in (batch.tokens, batch.samples)
        )
        numbers = self._numbers_of(step)
        numbers[0] = len(unique)
        return PaddingSource(
            np.pad(batch.offsets.numpy(), (0, num_samples - len(batch)), mode="edge"),
            unique.numpy(),
            tokens,
            samples,
            LayoutRoom(tokens=num_tokens, longest=self._longest),
            num_rows=rows,
            global_tokens=global_tokens,
            numbers=numbers,
        )


def _longer(feature: Feature, shape: tuple[int, ...]) -> Array:
    out = np.full(shape, feature.pad, feature.values.dtype)
    out[: len(feature.values)] = feature.values
    return out
