"""The plain schedule: the stages of one batch, one after the other.

    load ──> look up rows ──> [forward, backward: the model's] ──> send gradients home, update rows

Every later schedule must give exactly the same rows, losses and updates as this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from freescale.balance.sampler import StepPlan
from freescale.data.sequence_batch import SequenceBatch
from freescale.embedding.id_map import IdMap
from freescale.embedding.sharded import Lookup, ShardedEmbedding
from freescale.pipeline.loader import PlannedBatch

TABLE = "item"


@dataclass(frozen=True)
class ReadyBatch:
    """A batch on its device together with the rows it needs.

    Args:
        plan: what the whole step consists of.
        batch: carries "item_slot", "target_slot" and "negative_slot": places in `lookup.rows`.
        lookup: the distinct rows.
    """

    plan: StepPlan
    batch: SequenceBatch
    lookup: Lookup


class PlainSchedule:
    """Looks rows up right before they are needed and updates them right after.

    Args:
        batches: planned batches in step order.
        embedding: the item table.
        id_map: raw ids to rows.
        device: where the model computes.
    """

    def __init__(
        self,
        batches: Iterator[PlannedBatch],
        *,
        embedding: ShardedEmbedding,
        id_map: IdMap,
        device: torch.device,
    ) -> None:
        self._batches = batches
        self._embedding = embedding
        self._id_map = id_map
        self._device = device

    def __iter__(self) -> Iterator[ReadyBatch]:
        """Batches with their rows; take the next one only after `update` of the last."""
        for plan, batch in self._batches:
            lookup, slotted = with_slots(batch, self._embedding, self._id_map, self._device, step=plan.step)
            yield ReadyBatch(plan, slotted, lookup)

    def update(self, ready: ReadyBatch, *, lr: float) -> None:
        """Send the gradients of a batch home and update its rows."""
        self._embedding.update(ready.lookup, lr=lr, step=ready.plan.step + 1)

    def flush(self) -> None:
        """Bring every row up to date; here they always are."""


def with_slots(
    batch: SequenceBatch,
    embedding: ShardedEmbedding,
    id_map: IdMap,
    device: torch.device,
    *,
    step: int | None = None,
) -> tuple[Lookup, SequenceBatch]:
    """Look up everything a batch mentions at once; the batch on its device, with places instead of ids.

    In training, `step` says which one: a map that learns ids gives rows to those it meets for the first time.
    """
    parts = [batch.tokens["item"], batch.tokens["target"]]
    negatives = batch.samples.get("negatives")
    if negatives is not None:
        parts.append(negatives.flatten())
    # Ids are mapped where the map lives. Formulas work on the CPU, where ids come from: no wait for the GPU.
    rows = id_map.rows(torch.cat(parts), step=step).to(device, non_blocking=True)
    lookup = embedding.lookup(TABLE, rows)
    item, target, *rest = lookup.slots.split([len(part) for part in parts])
    slotted = batch.to(device, non_blocking=True).with_tokens(item_slot=item, target_slot=target)
    if negatives is not None:
        slotted = slotted.with_samples(negative_slot=rest[0].view(negatives.shape))
    return lookup, slotted
