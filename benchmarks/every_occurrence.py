"""Rows of a step as they travel: how many every owner has to serve, and what it is without any deduplication.

Without it every occurrence of an id travels: ids of all events, targets and negatives, and a row and a gradient for
each. What is learnt stays the same; owners add up more gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import freescale.data.batches.examples as examples
import freescale.data.requests.request_examples as requests
from freescale.data import BatchFeatures, SequenceBatch, item_numbers
from freescale.embedding import Lookup, ShardedEmbedding, UniqueRows


@contextmanager
def counted_owners(out: Path, *, every: bool) -> Iterator[None]:
    """Runs inside write the rows that this rank had to serve a step, by table; `every`: all occurrences travel."""
    found: dict[str, list[int]] = {}
    before = (ShardedEmbedding.lookups, ShardedEmbedding._find, examples.with_unique_items)
    modules = (examples, requests)
    ShardedEmbedding.lookups = _counting(before[0], found)  # type: ignore[method-assign]
    if every:
        ShardedEmbedding._find = _find_every  # type: ignore[method-assign]
        for module in modules:
            module.with_unique_items = _with_every_item
    try:
        yield
    finally:
        ShardedEmbedding.lookups, ShardedEmbedding._find = before[:2]  # type: ignore[method-assign]
        for module in modules:
            module.with_unique_items = before[2]
    out.write_text(json.dumps(found))


def _counting(lookups: Callable[..., dict[str, Lookup]], found: dict[str, list[int]]) -> Callable[..., Any]:
    def counting(
        self: ShardedEmbedding, asked: Mapping[str, Tensor | UniqueRows], **options: Any
    ) -> dict[str, Lookup]:
        done = lookups(self, asked, **options)
        for name, lookup in done.items():
            if lookup.route is not None:
                found.setdefault(name, []).append(sum(lookup.route.receive))
        return done

    return counting


def _find_every(self: ShardedEmbedding, name: str, asked: Tensor) -> UniqueRows:
    """In the place of `ShardedEmbedding._find`: sorted, so that rows stand by owner, and none left out."""
    rows, order = asked.long().cpu().flatten().sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    found = UniqueRows(rows, place.view(asked.shape))
    if self.device.type == "cuda":
        return UniqueRows(found.unique.pin_memory(), found.inverse.pin_memory())
    return found


def _with_every_item(batch: SequenceBatch, features: BatchFeatures) -> SequenceBatch:
    """In the place of `with_unique_items`: what is known of an item once for every occurrence of it."""
    tokens, samples = batch.tokens, batch.samples
    negatives = samples.get("negatives", tokens["item"][:0])
    # Of requests items and targets are the same tokens.
    targets = tokens["item"][:0] if tokens["target"] is tokens["item"] else tokens["target"]
    parts = [tokens["item"], targets, negatives]
    ids = np.concatenate([part.numpy().ravel() for part in parts])
    item, target, negative = torch.arange(len(ids)).split([part.numel() for part in parts])
    batch = batch.with_tokens(item_index=item, target_index=target if len(target) else item)
    batch = batch.with_samples(negative_index=negative.view(negatives.shape)) if len(negative) else batch
    made = features.items(item_numbers(features.source.items.ids, ids))
    return batch.with_items(**examples.as_tensors(made))
