"""From a batch to the rows it needs: ids to rows of every table, unique rows, and the batch with indices into them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.embedding import IdMap, Lookup, ShardedEmbedding, UniqueRows
from freescale.pipeline.ids.batch_ids import ids_of, with_indices
from freescale.pipeline.ids.feature_ids import FeatureIds

TABLE = "item"
_NOTHING = torch.zeros(0, dtype=torch.int64)
NO_ROWS = Lookup(TABLE, torch.zeros(0, 0), _NOTHING, _NOTHING)
"""What a batch has where items have no table."""


def look_up(
    batch: SequenceBatch,
    embedding: ShardedEmbedding,
    id_map: IdMap,
    device: torch.device,
    *,
    step: int | None = None,
) -> tuple[Lookup, SequenceBatch]:
    """Look up everything a batch mentions at once; the batch on its device, with indices instead of ids.

    In training, `step` says which one: a map that learns ids gives rows to those it meets for the first time.
    """
    found, indexed = find_rows(batch, embedding, id_map, device, step=step)
    return embedding.lookups(found)[TABLE] if found else NO_ROWS, indexed


def find_rows(
    batch: SequenceBatch,
    embedding: ShardedEmbedding,
    id_map: IdMap,
    device: torch.device,
    *,
    step: int | None = None,
    features: FeatureIds | None = None,
) -> tuple[dict[str, UniqueRows], SequenceBatch]:
    """The unique rows of everything a batch mentions, by table, and the batch on its device, with indices into them."""
    if not embedding.plans:
        return {}, batch.to(device, non_blocking=True)
    # Ids are mapped and made unique where the map lives. Formulas work on the CPU, where ids come from: nobody waits
    # for the GPU to learn how many rows are unique.
    asked = asked_rows(batch, id_map, features, step=step)
    found = {name: rows.to(device) for name, rows in embedding.find_all(asked).items()}
    inverse = {name: rows.inverse for name, rows in found.items()}
    return found, indices(batch, inverse, features, device)


def asked_rows(
    batch: SequenceBatch, id_map: IdMap, features: FeatureIds | None, *, step: int | None
) -> dict[str, Tensor]:
    """The rows of everything a batch mentions, by table."""
    if features is not None:
        return features.rows(batch, step=step)
    return {TABLE: id_map.rows(torch.cat(ids_of(batch)), step=step)}


def indices(
    batch: SequenceBatch, inverse: Mapping[str, Tensor], features: FeatureIds | None, device: torch.device
) -> SequenceBatch:
    """The batch on its device, with indices or slots instead of ids."""
    if features is not None:
        return features.with_slots(batch, inverse, device=device)
    return with_indices(batch.to(device, non_blocking=True), inverse[TABLE])
