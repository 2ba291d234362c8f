"""FeaturedItems: item vectors from their rows and from what else is known of them; an item encoder.

    rows of item, artist, genre, ...  ──join──> vectors (leaf) ──> model ──> gradient ──join's backward──> rows

In training the schedule brings the rows of all tables along. Where all items are ranked, each rank makes the vectors of
its share of the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.data import BatchFeatures, IntArray, SequenceBatch, item_numbers
from freescale.embedding import ShardedCompute, ShardedEmbedding, as_compute
from freescale.kernels.runtime import on_device
from freescale.model import FeatureJoin, ItemTowers
from freescale.pipeline import FeatureIds, ReadyBatch, ids_of, with_indices
from freescale.trace import compute
from freescale.train.item_vectors import BatchItems, Catalogue, ShareCatalogue


@dataclass(frozen=True, kw_only=True)
class FeaturedItems:
    """Vectors of items that have features.

    Args:
        join: makes them, from rows and numbers.
        features: reads what is known of items.
        ids: of all features that have rows.
        of_tokens: tables that features of events and users have rows in.
        embedding: the tables.
        work: which rank makes which vectors of the catalogue.
        device: where the model computes.
        grows: the catalogue is another one from time to time; then items have nothing but their ids.
    """

    join: FeatureJoin | ItemTowers
    features: BatchFeatures
    ids: FeatureIds
    of_tokens: frozenset[str]
    embedding: ShardedEmbedding
    work: ShardedCompute
    device: torch.device
    grows: bool = False

    def encode(self, ready: ReadyBatch) -> BatchItems:
        """The vectors of a batch, each distinct item once."""
        rows = {name: lookup.rows for name, lookup in ready.lookups.items()}
        with compute("encode items"):
            encoded = as_compute(self.join(ready.batch.items, rows))
        leaf = encoded.detach().requires_grad_()

        def send_back() -> None:
            with compute("item encoder backward"):
                encoded.backward(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf))

        tables = {name: values for name, values in rows.items() if name in self.of_tokens}
        return BatchItems(leaf, ready.batch, send_back, tables)

    def vectors(
        self, rows: Mapping[str, Tensor], batch: SequenceBatch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The same inside the model's graph, for steps that are one piece of work; and the rows that tokens read."""
        tables = {name: values for name, values in rows.items() if name in self.of_tokens}
        return as_compute(self.join(batch.items, rows)), tables

    @torch.no_grad()
    def catalogue(self, items: IntArray, *, chunk: int) -> Catalogue:
        """The vectors of all items, each made by the rank whose share it is in; every rank must call it."""
        work = self.work.resized(len(items)) if self.grows else self.work
        own = work.own
        # The same number of rounds on every rank: rows are fetched by all of them together.
        rounds = -(-work.plan.block_rows // chunk)
        vectors = [self._vectors(items, own[n * chunk : (n + 1) * chunk]) for n in range(rounds)]
        find = self.look_up_anew if self.grows else self.look_up
        return ShareCatalogue(own, torch.cat(vectors), chunk, find)

    def _vectors(self, items: IntArray, numbers: Tensor) -> Tensor:
        """Of the items with these numbers in the catalogue."""
        known = {"item": items[numbers.numpy()]} if self.grows else self.features.items(numbers.numpy())
        found = {name: torch.from_numpy(each) for name, each in known.items()}
        empty = SequenceBatch(torch.zeros(1, dtype=torch.int64), items=found)
        rows, batch = self._look_up(empty, self.ids.of("items"))
        return as_compute(self.join(batch.items, rows))

    def look_up(self, batch: SequenceBatch, vectors: Tensor) -> BatchItems:
        """A batch with the vectors of its items, out of those of this rank's share."""
        rows, indexed = self._look_up(batch, self.ids.of("tokens", "samples"))
        ids = self.features.source.items.ids
        numbers = torch.from_numpy(item_numbers(ids, torch.cat(ids_of(batch)).numpy()))
        request = self.work.request(numbers)
        own = vectors.index_select(0, on_device(request.owned.unique, vectors.device))
        indexed = with_indices(indexed, on_device(request.inverse, self.device))
        return BatchItems(self.work.deliver(own, request), indexed, tables=rows)

    def look_up_anew(self, batch: SequenceBatch, vectors: Tensor) -> BatchItems:
        """A batch with the vectors of its items, made from rows; they may be of items that the catalogue lacks."""
        rows, indexed = self._look_up(batch, self.ids)
        tables = {name: values for name, values in rows.items() if name in self.of_tokens}
        return BatchItems(as_compute(self.join(indexed.items, rows)), indexed, tables=tables)

    def _look_up(self, batch: SequenceBatch, ids: FeatureIds) -> tuple[dict[str, Tensor], SequenceBatch]:
        """Rows of some features of a batch, as they are now, and the batch with slots; every rank must call it."""
        asked = ids.rows(batch)
        found = {name: rows.to(self.device) for name, rows in self.embedding.find_all(asked).items()}
        lookups = self.embedding.lookups(found) if found else {}
        inverse = {name: each.inverse for name, each in found.items()}
        rows = {name: lookup.rows.detach() for name, lookup in lookups.items()}
        return rows, ids.with_slots(batch, inverse, device=self.device)
