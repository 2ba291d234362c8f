"""Batches padded to a few sizes, so that a step can be recorded once for each and replayed.

    tokens     real ones, then pads up to the next of a few sizes (`sizes.py`)
    sequences  real ones, then some without tokens
    rows       of every table the unique rows of the batch, then rows that nothing reads, and one that only pads read
    items      the distinct items, where there are features of them, then some that have none; pads read the last one

Padding belongs to the batch: it is padded by the thread that makes it ready, whether its step is then recorded,
replayed or computed as usual. Pads have no loss and give exact zeros to every gradient. Everything that the model reads
of a batch, features and lists of tiles alike, travels in one parcel; what is where in it follows from the sizes alone,
so that a copy of one parcel onto another replaces one batch by the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.data import SequenceBatch, TokenRule
from freescale.kernels import LayoutRoom, LayoutWishes, SequenceLayout
from freescale.kernels.runtime import Parcel
from freescale.pipeline.padding.padded_batch import PaddedBatch, PaddedViews
from freescale.pipeline.padding.sizes import UNFORESEEN, PaddingSizes
from freescale.pipeline.padding.source import Feature, PaddingSource, Template
from freescale.pipeline.padding.step_numbers import NUM_NUMBERS, StepNumbers

Array = npt.NDArray[Any]
RAW_IDS = frozenset({"item", "target", "negatives"})
"""The model reads their indices."""
_INDICES = ("item_index", "target_index", "negative_index")


class Padder:
    """Pads batches and sends them to their device.

    Batches are sent with all that the model reads. Where their size is replayed they are only written to where that
    lies: tensors of every feature and list would take longer to make than to fill.

    Args:
        device: where the model computes.
        longest: tokens of the longest sequence there may be.
        table_rows: rows of every table: no batch has more.
        numbers_of: step -> its numbers (`pack_numbers`); zeros unless given.
        sizes: that batches are padded to.
        num_parts: micro-batches a step; all have the rows of the step.
        num_items: of the catalogue, where batches say something of each item.
        rule: how sequences grow by tokens of features; None: they do not.
        unread: features of batches that nobody reads.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        longest: int,
        table_rows: Mapping[str, int],
        numbers_of: Callable[[int], Array] | None = None,
        sizes: PaddingSizes = UNFORESEEN,
        num_parts: int = 1,
        num_items: int = 0,
        rule: TokenRule | None = None,
        unread: frozenset[str] = RAW_IDS,
    ) -> None:
        self._numbers_of, self._sizes, self._num_parts = numbers_of, sizes, num_parts
        self._device, self._longest, self._table_rows = device, longest, dict(table_rows)
        self._num_items, self._rule, self._unread = num_items, rule, unread
        self._wishes, self._longer_wishes = LayoutWishes(), LayoutWishes()
        self._templates: dict[tuple[Any, ...], Template] = {}
        self._replayed: set[tuple[Any, ...]] = set()
        self._useful: tuple[tuple[int, int], dict[tuple[Any, ...], Template]] = ((0, 0), {})

    def pad(
        self, batch: SequenceBatch, unique: Mapping[str, Tensor], *, global_tokens: int, step: int = 0
    ) -> PaddedBatch:
        """The batch padded and on its way to the device.

        Args:
            batch: on the CPU, with indices or slots beside its ids.
            unique: by table, [U] numbers of its unique rows.
            global_tokens: of all ranks.
            step: counted from 0.
        """
        parts = batch.split(self._num_parts) if self._num_parts > 1 else [batch]
        first, *rest = (
            self.pad_source(self.source(part, unique, global_tokens=global_tokens, step=step))
            for part in parts
        )
        return replace(first, rest=tuple(rest)) if rest else first

    def pad_source(self, source: PaddingSource) -> PaddedBatch:
        """The same of a batch whose size is known."""
        template = self._templates.get((self._noted(), *source.size))
        if template is None or template.key not in self._replayed:
            return self.send(source)
        return self._write(source, template)

    def send(self, source: PaddingSource, *, into: Tensor | None = None) -> PaddedBatch:
        """A padded batch on its device with all that the model reads, in new memory or in some that is given."""
        noted = self._noted()
        unique_bytes = 8 * sum(source.num_rows.values())
        room = len(into) if into is not None else self._wishes.parcel_bytes + unique_bytes
        parcel = Parcel(self._device, room=room, into=into)
        padded = list(source.padded())
        sent = iter([parcel.add(_longer(feature, shape))[0] for feature, shape in padded])
        layout, num_lists = self._layout(source, parcel)
        parcel.send()
        if into is None:
            self._wishes.took(parcel.wanted)
        unique = {name: next(sent) for name in source.unique}
        divisor, numbers = next(sent)[0], StepNumbers.of(next(sent))
        tokens, samples, items = (
            {feature.name: next(sent) for feature in features}
            for features in (source.tokens, source.samples, source.items)
        )
        pads = source.room.tokens - int(source.offsets[-1])
        batch = SequenceBatch(layout.offsets, tokens, samples, pads=pads, items=items)
        views = PaddedViews(batch, layout, divisor, unique, numbers)
        lists = parcel.filled_in
        # A list whose size follows from the lengths cannot be written by the sizes alone.
        fixed = len(parcel.shapes) == len(padded) + sum(len(shapes) for _, shapes in lists)
        made = self._made(source, parcel, _key(source, layout, parcel), views, fixed=fixed)
        if made.in_one_piece and all(noted) and fixed:
            template = Template(made.key, parcel.filled, lists[:num_lists], lists[num_lists:])
            self._templates[noted, *source.size] = template
        return made

    def _noted(self) -> tuple[int, ...]:
        """How many lists are known to be read."""
        plain = (self._wishes.count,)
        return plain if self._rule is None else (*plain, self._longer_wishes.count)

    def _layout(self, source: PaddingSource, parcel: Parcel) -> tuple[SequenceLayout, int]:
        """Where sequences stand, with all lists in the parcel; and how many of those are not of longer sequences."""

        def prepared(offsets: Array, room: LayoutRoom, wishes: LayoutWishes) -> SequenceLayout:
            starts = torch.from_numpy(offsets)
            layout = SequenceLayout(starts, device=self._device, room=room, wishes=wishes)
            layout.prepare(parcel)
            return layout

        layout = prepared(source.offsets, source.room, self._wishes)
        num_lists = len(parcel.filled_in)
        if source.longer is not None:
            layout.longer = prepared(*source.longer, self._longer_wishes)
        return layout, num_lists

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

    def written(
        self,
        content: Tensor,
        template: Template,
        *,
        num_rows: Mapping[str, int],
        real_rows: Mapping[str, int],
    ) -> PaddedBatch:
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
        self,
        source: PaddingSource,
        parcel: Parcel,
        key: tuple[Any, ...],
        views: PaddedViews | None,
        *,
        fixed: bool = True,
    ) -> PaddedBatch:
        tokens, samples = source.room.tokens, len(source.offsets) - 1
        foreseen = self._sizes.holds(
            tokens=tokens,
            samples=samples,
            rows=source.num_rows,
            items=source.num_items,
            blocks=source.room.blocks,
        )
        return PaddedBatch(
            parcel.tensors(),
            parcel.filled,
            num_rows=source.num_rows,
            real_rows={name: len(rows) for name, rows in source.unique.items()},
            key=key,
            sent=views,
            again=lambda into: self.send(source, into=into),
            replayed=self._replayed,
            foreseen=partial(self.foreseen, source) if foreseen else None,
            fixed=fixed,
        )

    def source(
        self, batch: SequenceBatch, unique: Mapping[str, Tensor], *, global_tokens: int, step: int = 0
    ) -> PaddingSource:
        """A batch and the size it is to have; the arguments are those of `pad`, for one part."""
        num_samples = self._sizes.samples_for(len(batch))
        rows = {
            name: self._sizes.rows_for(name, len(unique[name]), table_rows=most)
            for name, most in self._table_rows.items()
        }
        items = 0
        if batch.items:
            known = len(next(iter(batch.items.values())))
            items = self._sizes.items_for(known, num_items=self._num_items)
        # Without items of their own, indices point to rows of the first table.
        nobody = (items or next(iter(rows.values()))) - 1
        features = (
            [
                Feature(name, x.numpy(), nobody if name in _INDICES else 0)
                for name, x in part.items()
                if name not in self._unread
            ]
            for part in (batch.tokens, batch.samples, batch.items)
        )
        return PaddingSource(
            np.pad(batch.offsets.numpy(), (0, num_samples - len(batch)), mode="edge"),
            {name: unique[name].numpy() for name in rows},
            *(next(features), next(features)),
            self._sizes.room_for(np.diff(batch.offsets.numpy()), longest=self._longest, rule=self._rule),
            num_rows=rows,
            global_tokens=global_tokens,
            numbers=self._numbers(step, [len(unique[name]) for name in rows]),
            items=next(features),
            num_items=items,
            rule=self._rule,
        )

    def _numbers(self, step: int, real_rows: list[int]) -> Array:
        if self._numbers_of is None:
            numbers = np.zeros(NUM_NUMBERS * len(real_rows), np.int64)
        else:
            numbers = self._numbers_of(step)
        numbers[::NUM_NUMBERS] = real_rows
        return numbers


def _key(source: PaddingSource, layout: SequenceLayout, parcel: Parcel) -> tuple[Any, ...]:
    """What batches have in common whose parcels can take each other's place."""
    longer = () if layout.longer is None else layout.longer.kernel_choice
    rows = (*source.num_rows.values(), source.num_items, *longer)
    return rows, *layout.kernel_choice, *parcel.shapes


def _longer(feature: Feature, shape: tuple[int, ...]) -> Array:
    out = np.full(shape, feature.pad, feature.values.dtype)
    out[: len(feature.values)] = feature.values
    return out
