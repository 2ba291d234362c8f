"""Item encoders: where the vectors of items come from, in training and when all items are ranked.

    IdItems        rows of a table, looked up by the schedule                  items.kind=ids
    EncodedItems   computed from content or text, plus the rows of a table     items.kind=content, text

In a step the model sees vectors as leaves of its graph, and their gradient after its backward goes back where they
came from. So an item is encoded once a step, whatever the number of its occurrences, micro-batches and ranks:

    encode items ──> vectors (leaf) ──> model forward, backward, in micro-batches ──> gradient ──> encoder's backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from freescale.data import ContentFile, IntArray, NumberedTexts, SequenceBatch, item_numbers
from freescale.embedding import (
    IdMap,
    Lookup,
    Request,
    ShardedCompute,
    ShardedEmbedding,
    UniqueRows,
    as_compute,
    learns_ids,
)
from freescale.errors import DataError
from freescale.kernels.rows import sum_gradients, unique
from freescale.kernels.runtime import on_device
from freescale.pipeline import TABLE, ReadyBatch, find_rows, ids_of, look_up, with_indices
from freescale.trace import compute

Part = tuple[Tensor, Tensor]
"""Numbers of items in the catalogue, ascending, and their vectors."""


@dataclass(frozen=True)
class BatchItems:
    """The items of one batch, ready for the model.

    Args:
        rows: [U, dim] leaf with requires_grad.
        batch: its indices point into `rows`.
        send_back: takes the gradient of `rows` to what they were made from; call it after the last backward.
        tables: the unique rows of tables that features of events and users have rows in; leaves, too.
    """

    rows: Tensor
    batch: SequenceBatch
    send_back: Callable[[], None] = lambda: None
    tables: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FoundRows:
    """What of a look-up follows from ids alone, where ids keep their rows.

    Args:
        rows: the unique rows of the batch, by table.
        batch: on its device, with indices into them.
    """

    rows: Mapping[str, UniqueRows]
    batch: SequenceBatch

    @property
    def nbytes(self) -> int:
        """What it takes to keep the rows; the batch is counted by who has it."""
        return sum(each.unique.nbytes + each.inverse.nbytes for each in self.rows.values())


class Catalogue(Protocol):
    """The vectors of all items at one moment."""

    @property
    def spread(self) -> bool:
        """Each rank holds some of them, and looking up is done by all ranks together."""

    def parts(self) -> Iterator[Part]:
        """The items held here, in chunks; every rank must ask first, and any may ask again."""

    def find(self, batch: SequenceBatch) -> FoundRows | None:
        """What later look-ups of this batch need not find out again, by catalogues of later moments, too."""

    def look_up(self, batch: SequenceBatch, found: FoundRows | None = None) -> BatchItems:
        """The unique item vectors of a batch, and the batch on its device with indices into them; without gradients."""


class ItemEncoder(Protocol):
    """Turns items into vectors."""

    def encode(self, ready: ReadyBatch) -> BatchItems:
        """The vectors of a training batch."""

    def catalogue(self, items: IntArray, *, chunk: int) -> Catalogue:
        """The vectors of all items (ascending ids), made in chunks; every rank must call it."""


class ItemContent(Protocol):
    """What an encoder reads of items, by their numbers in the catalogue."""

    def of(self, numbers: Tensor, device: torch.device) -> Any:
        """The input of the encoder's module for these items."""


@dataclass(frozen=True)
class ContentInput:
    """Content vectors, read from disk for the items asked for."""

    file: ContentFile

    def of(self, numbers: Tensor, device: torch.device) -> Tensor:
        """[n, width]."""
        return on_device(torch.from_numpy(self.file.read(numbers.numpy())), device)


@dataclass(frozen=True)
class TextInput:
    """Texts as numbers of their pieces."""

    texts: NumberedTexts

    def of(self, numbers: Tensor, device: torch.device) -> SequenceBatch:
        """The texts as a jagged batch."""
        batch = self.texts.batch(numbers.numpy())
        return (batch.pin() if device.type == "cuda" else batch).to(device, non_blocking=True)


def looked_up(ready: ReadyBatch) -> BatchItems:
    """The rows that a batch comes with; the schedule's update takes their gradients home."""
    return BatchItems(ready.lookup.rows, ready.batch)


@dataclass(frozen=True, kw_only=True)
class IdItems:
    """Rows of the item table.

    Args:
        embedding: the item table.
        id_map: raw ids to rows.
        device: where the model computes.
    """

    embedding: ShardedEmbedding
    id_map: IdMap
    device: torch.device

    def encode(self, ready: ReadyBatch) -> BatchItems:
        """The rows looked up for the batch."""
        return looked_up(ready)

    def catalogue(self, items: IntArray, *, chunk: int) -> Catalogue:
        """Rows as they are now; of a map that learns, those of items that have rows of their own."""
        return _RowCatalogue(self, items, chunk, spread=not self.embedding.plans[TABLE].replicated)


@dataclass(frozen=True)
class _RowCatalogue:
    source: IdItems
    items: IntArray
    chunk: int
    spread: bool

    @cached_property
    def _held(self) -> Part:
        """Numbers of the items held here, and where their rows stand; asked for once, by all ranks together."""
        table, id_map = self.source.embedding.tables[TABLE], self.source.id_map
        items = torch.tensor(self.items)
        if learns_ids(id_map):
            # Items without a row of their own are not recommended, so they are no candidates either.
            ids, rows = id_map.residents()
            here = torch.isin(items.to(ids.device), ids, assume_unique=True)
            numbers = here.nonzero().flatten().to(self.source.device)
            rows = rows[torch.searchsorted(ids, items.to(ids.device)[here])].to(self.source.device)
            return numbers, rows - table.first_row
        rows = id_map.rows(items).to(self.source.device) - table.first_row
        numbers = torch.arange(len(self.items), device=rows.device)
        mine = (rows >= 0) & (rows < table.num_rows)
        return numbers[mine], rows[mine]

    def parts(self) -> Iterator[Part]:
        numbers, rows = self._held
        for n, r in zip(numbers.split(self.chunk), rows.split(self.chunk)):
            yield n, as_compute(self.source.embedding.tables[TABLE].gather(r))

    def find(self, batch: SequenceBatch) -> FoundRows | None:
        source = self.source
        if learns_ids(source.id_map) or not source.embedding.plans:
            return None
        return FoundRows(*find_rows(batch, source.embedding, source.id_map, source.device))

    def look_up(self, batch: SequenceBatch, found: FoundRows | None = None) -> BatchItems:
        source = self.source
        if found is not None:
            return BatchItems(source.embedding.lookups(found.rows)[TABLE].rows.detach(), found.batch)
        lookup, indexed = look_up(batch, source.embedding, source.id_map, source.device)
        return BatchItems(lookup.rows.detach(), indexed)


class EncodedItems:
    """Vectors computed from what is known of items, with or without rows of a table added.

    Args:
        module: the input that `content` makes -> [n, dim]; its gradients are summed over ranks by the training step.
        content: what is known of items.
        items: ids of the catalogue, ascending.
        work: who encodes which item.
        rows: the table to add rows of; None: none are added.
        device: where the model computes.
        alone: in training every rank encodes all items of its own batch: for encoders that cost less than the traffic.
        chunk: items encoded at once; more are computed again in the backward instead of kept.
    """

    def __init__(
        self,
        module: nn.Module,
        content: ItemContent,
        *,
        items: IntArray,
        work: ShardedCompute,
        rows: IdItems | None,
        device: torch.device,
        alone: bool = False,
        chunk: int = 8192,
    ) -> None:
        self._module, self._content, self._items, self._work = module, content, items, work
        self._table, self._device, self._alone, self._chunk = rows, device, alone, chunk

    def encode(self, ready: ReadyBatch) -> BatchItems:
        """Each distinct item of the global batch once, by one rank; or of this rank's batch, where it works alone."""
        loaded = ready.batch if ready.loaded is None else ready.loaded
        encoded, request, inverse = self._encode_batch(loaded)
        vectors = encoded.detach() if request is None else self._work.deliver(encoded.detach(), request)
        rows = ready.lookup.rows
        row_of = None if self._table is None else _row_of_items(ready.lookup, inverse, len(vectors))
        leaf = vectors if row_of is None else vectors + rows.detach().index_select(0, row_of)
        leaf = leaf.requires_grad_()

        def send_back() -> None:
            grad = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            if row_of is not None:
                rows.grad = sum_gradients(grad, row_of, len(rows))
            home = grad if request is None else self._work.collect(grad, request)
            with compute("item encoder backward"):
                encoded.backward(home)

        return BatchItems(leaf, with_indices(ready.batch, inverse), send_back)

    @torch.no_grad()
    def catalogue(self, items: IntArray, *, chunk: int) -> Catalogue:
        """Every item encoded once, by the rank whose share it is in."""
        if not np.array_equal(items, self._items):
            raise DataError(
                "these are other items than those that are encoded: their numbers would name other vectors",
                got=f"{len(items):,} items",
                allowed=f"the {len(self._items):,} items of the source that the run was made with",
                next_step="make one source, and give it to the run and to what evaluates it",
            )
        own = self._work.own
        # The same number of rounds on every rank: rows of a table are fetched by all of them together.
        rounds = -(-self._work.plan.block_rows // chunk)
        vectors = [self._own_vectors(own[n * chunk : (n + 1) * chunk]) for n in range(rounds)]
        return ShareCatalogue(own, torch.cat(vectors), chunk, self.look_up)

    def numbers(self, batch: SequenceBatch) -> Tensor:
        """The number in the catalogue of every item a batch mentions, on the CPU."""
        return torch.from_numpy(item_numbers(self._items, torch.cat(ids_of(batch)).cpu().numpy()))

    def look_up(self, batch: SequenceBatch, vectors: Tensor) -> BatchItems:
        """The items of a batch out of `vectors`, which hold this rank's share."""
        request = self._work.request(self.numbers(batch))
        rows = self._work.deliver(vectors.index_select(0, request.owned.unique.to(vectors.device)), request)
        indexed = with_indices(
            batch.to(self._device, non_blocking=True), on_device(request.inverse, self._device)
        )
        return BatchItems(rows, indexed)

    def _encode_batch(self, batch: SequenceBatch) -> tuple[Tensor, Request | None, Tensor]:
        """What this rank encodes for a batch, who asked for it, and the place of every id in what the batch gets."""
        numbers = self.numbers(batch)
        if self._alone:
            wanted, inverse = unique(numbers)
            return self._encode(wanted), None, on_device(inverse, self._device)
        request = self._work.request(numbers)
        encoded = self._encode(self._work.wanted(request))
        return encoded, request, on_device(request.inverse, self._device)

    def _encode(self, numbers: Tensor) -> Tensor:
        """[n, dim] float32 or better; with a graph where gradients are wanted."""
        with compute("encode items"):
            chunks = numbers.split(self._chunk) if len(numbers) else [numbers]
            again = len(chunks) > 1 and torch.is_grad_enabled()
            return torch.cat(
                [
                    checkpoint(self._encode_chunk, chunk, use_reentrant=False)
                    if again
                    else self._encode_chunk(chunk)
                    for chunk in chunks
                ]
            )

    def _encode_chunk(self, numbers: Tensor) -> Tensor:
        return as_compute(self._module(self._content.of(numbers, self._device)))

    def _own_vectors(self, numbers: Tensor) -> Tensor:
        """Vectors of some items of this rank's share, rows of the table added."""
        vectors = self._encode(numbers)
        if self._table is None:
            return vectors
        rows = self._table.id_map.rows(torch.from_numpy(self._items[numbers.numpy()]))
        return vectors + self._table.embedding.lookup(TABLE, rows.to(self._device)).vectors()


@dataclass(frozen=True)
class ShareCatalogue:
    """A catalogue of computed vectors of which each rank holds a share.

    Args:
        own: numbers of the items of this rank's share.
        vectors: theirs.
        chunk: items handed out at once.
        pick: a batch with the vectors of its items, out of the shares of all ranks.
    """

    own: Tensor
    vectors: Tensor
    chunk: int
    pick: Callable[[SequenceBatch, Tensor], BatchItems]
    spread: bool = True

    @cached_property
    def _order(self) -> Tensor:
        return self.own.argsort()

    def parts(self) -> Iterator[Part]:
        """The items of this share, ascending, in chunks."""
        for index in self._order.split(self.chunk):
            device = self.vectors.device
            yield self.own[index].to(device), self.vectors.index_select(0, index.to(device))

    def find(self, batch: SequenceBatch) -> FoundRows | None:
        """Nothing: vectors that are computed are picked, not looked up."""
        return None

    def look_up(self, batch: SequenceBatch, found: FoundRows | None = None) -> BatchItems:
        """The vectors of a batch's items; every rank must call it."""
        return self.pick(batch, self.vectors)


def _row_of_items(lookup: Lookup, inverse: Tensor, num_items: int) -> Tensor:
    """[items] where the row of each unique item stands among the rows looked up; several may share one."""
    # An item that occurs several times is written several times, with the same value.
    return inverse.new_empty(num_items).index_put_((inverse,), lookup.inverse.flatten())
