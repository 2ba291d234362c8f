"""RowFinder: a batch on the CPU with indices instead of ids, and its unique rows by table: what is padded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.embedding import IdMap, ShardedEmbedding, TableSpec, check_range
from freescale.kernels.rows import unique
from freescale.pipeline.ids.batch_ids import unique_rows, with_indices
from freescale.pipeline.ids.batch_rows import TABLE, indices
from freescale.pipeline.ids.feature_ids import FeatureIds

_CPU = torch.device("cpu")


class IndexedBatch(NamedTuple):
    """A batch whose rows are known.

    Args:
        batch: with indices or slots beside its ids.
        unique: by table, [U] the numbers of its unique rows, ascending.
    """

    batch: SequenceBatch
    unique: dict[str, Tensor]


@dataclass(frozen=True)
class RowFinder:
    """Finds the rows of batches; works on the CPU alone, so that any process can.

    Args:
        id_map: raw ids of items to rows; a formula, as all maps here.
        tables: all of them.
        features: ids of features; without them batches ask for items alone.
    """

    id_map: IdMap
    tables: Mapping[str, TableSpec]
    features: FeatureIds | None = None

    @classmethod
    def of(cls, embedding: ShardedEmbedding, id_map: IdMap, features: FeatureIds | None = None) -> RowFinder:
        """For the tables of an embedding."""
        return cls(id_map, {name: plan.spec for name, plan in embedding.plans.items()}, features)

    def find(self, batch: SequenceBatch, *, step: int) -> IndexedBatch:
        """All rows of a batch of this step."""
        if self.features is not None:
            return self.of_rows(batch, self.features.rows(batch, step=step))
        rows, index = unique_rows(batch, self.id_map, self.tables[TABLE], step=step)
        return IndexedBatch(with_indices(batch, index), {TABLE: rows})

    def of_rows(self, batch: SequenceBatch, asked: Mapping[str, Tensor]) -> IndexedBatch:
        """The same of a batch whose ids have become rows, by table, in the order in which it has them."""
        found = {name: unique(rows) for name, rows in asked.items()}
        for name, (rows, _) in found.items():
            check_range(self.tables[name], rows)
        inverse = {name: index for name, (_, index) in found.items()}
        indexed = indices(batch, inverse, self.features, _CPU)
        return IndexedBatch(indexed, {name: rows for name, (rows, _) in found.items()})
