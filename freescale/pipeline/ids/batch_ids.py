"""What a batch mentions: all its ids in one order, their unique rows, and the batch with indices instead of ids."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.embedding import IdMap, TableSpec, check_range
from freescale.kernels.rows import unique


def ids_of(batch: SequenceBatch) -> list[Tensor]:
    """Everything a batch mentions."""
    parts = [batch.tokens["item"], batch.tokens["target"]]
    negatives = batch.samples.get("negatives")
    return parts if negatives is None else [*parts, negatives.flatten()]


def with_indices(batch: SequenceBatch, inverse: Tensor) -> SequenceBatch:
    """The batch with the index of every id in the vectors it goes with; `inverse` in the order of `ids_of`."""
    item, target, *rest = inverse.split([len(part) for part in ids_of(batch)])
    indexed = batch.with_tokens(item_index=item, target_index=target)
    if rest:
        indexed = indexed.with_samples(negative_index=rest[0].view(batch.samples["negatives"].shape))
    return indexed


def unique_rows(batch: SequenceBatch, id_map: IdMap, table: TableSpec, *, step: int) -> tuple[Tensor, Tensor]:
    """The unique rows of a batch, ascending, and where everything it mentions stands among them; on the CPU."""
    # Ids are made unique first: a map then has a fraction of them to look up.
    ids, id_index = unique(torch.cat(ids_of(batch)))
    rows, row_index = unique(id_map.rows(ids, step=step))
    check_range(table, rows)
    return rows, row_index[id_index]
