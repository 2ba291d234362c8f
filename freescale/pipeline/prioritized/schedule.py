"""The prioritized schedule of a training run: what `pipeline.py` draws, for batches of histories."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from freescale.embedding import IdMap, ShardedEmbedding, learns_ids
from freescale.errors import ConfigError
from freescale.pipeline.ids.batch_rows import NO_ROWS, TABLE, asked_rows, indices
from freescale.pipeline.ids.feature_ids import FeatureIds
from freescale.pipeline.ids.row_finder import RowFinder
from freescale.pipeline.loading.layouts import LayoutPlanner, PreparedLayouts
from freescale.pipeline.loading.loader import PlannedBatch
from freescale.pipeline.loading.parcel_loader import ParcelLoader
from freescale.pipeline.padding.padded_batch import PaddedBatch
from freescale.pipeline.padding.padder import Padder
from freescale.pipeline.prioritized.in_flight import ReadyRows
from freescale.pipeline.prioritized.pipeline import LOOK_AHEAD, PrioritizedPipeline
from freescale.pipeline.schedule import ReadyBatch, end_loading


class PrioritizedSchedule:
    """Moves rows and gradients under the compute of other batches wherever the order of updates allows it.

    Args:
        batches: planned batches in step order, or parcels that loader processes have padded.
        embedding: the item table.
        id_map: raw ids to rows; asked in step order, two batches ahead, from the communication thread.
        device: where the model computes.
        layouts: makes the layouts of batches, in that thread; without one it is left to the model.
        padder: pads batches, in that thread; ids must become rows on the CPU.
        features: ids of features; without them batches ask for items alone.
        options: of `PrioritizedPipeline`.
    """

    def __init__(
        self,
        batches: Iterator[PlannedBatch] | ParcelLoader,
        *,
        embedding: ShardedEmbedding,
        id_map: IdMap,
        device: torch.device,
        layouts: LayoutPlanner | None = None,
        padder: Padder | None = None,
        features: FeatureIds | None = None,
        **options: Any,
    ) -> None:
        if learns_ids(id_map) and id_map.guard <= LOOK_AHEAD:
            raise ConfigError(
                "ids may take over rows of batches under way",
                got=f"guard={id_map.guard}",
                allowed=f"{LOOK_AHEAD + 1} or more",
                next_step="raise the id map's guard, or set pipeline.prioritized=false",
            )
        self._batches = batches
        self._id_map = id_map
        self._features = features
        self._finder = RowFinder.of(embedding, id_map, features)
        self._device = device
        self._layouts = layouts
        self._made: dict[int, PreparedLayouts] = {}
        self._padder = padder
        self._padded: dict[int, PaddedBatch] = {}
        self._rows: dict[int, dict[str, Tensor]] = {}
        self._taken: ReadyRows[PlannedBatch] | None = None
        planned = self._opened(batches) if isinstance(batches, ParcelLoader) else batches
        self.pipeline = PrioritizedPipeline(planned, embedding=embedding, rows_of=self._rows_of, **options)

    def __iter__(self) -> Iterator[ReadyBatch]:
        """Batches with their rows; take the next one only after `update` of the last."""
        for ready in self.pipeline:
            self._taken = ready
            plan, batch = ready.batch
            lookup = ready.lookups.get(TABLE, NO_ROWS)
            padded = self._padded.pop(plan.step, None)
            if padded is not None:
                padded.record_stream()
                yield ReadyBatch(
                    *(plan, batch, lookup, ready.traffic), loaded=batch, padded=padded, lookups=ready.lookups
                )
                continue
            inverse = {name: each.inverse for name, each in ready.lookups.items()}
            indexed = indices(batch, inverse, self._features, self._device)
            layouts = self._made.pop(plan.step, PreparedLayouts())
            layouts.record_stream()
            yield ReadyBatch(
                plan,
                indexed,
                lookup,
                ready.traffic,
                loaded=batch,
                layouts=layouts.parts,
                lookups=ready.lookups,
            )

    def update(self, ready: ReadyBatch, *, lr: float) -> None:
        """Send the gradients home that the next batch depends on; the others follow under its forward."""
        assert self._taken is not None
        self.pipeline.update(self._taken, lr=lr)

    def flush(self) -> None:
        """Bring every row up to date: wait for gradients that are still under way."""
        self.pipeline.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.pipeline.__exit__(*error)
        end_loading(self._batches, error)

    def _opened(self, parcels: ParcelLoader) -> Iterator[PlannedBatch]:
        """What the pipeline is given of parcels; the rest is kept until their step comes."""
        while (parcel := parcels.next()) is not None:
            self._padded[parcel.plan.step] = parcel.padded
            self._rows[parcel.plan.step] = parcel.rows
            yield PlannedBatch(parcel.plan, parcel.batch)

    def _rows_of(self, planned: PlannedBatch) -> dict[str, Tensor]:
        plan, batch = planned
        if (unique := self._rows.pop(plan.step, None)) is not None:
            return unique
        asked = asked_rows(batch, self._id_map, self._features, step=plan.step)
        if self._padder is not None:
            found = self._finder.of_rows(batch, asked)
            self._padded[plan.step] = self._padder.pad(*found, global_tokens=plan.divisor, step=plan.step)
        elif self._layouts is not None:
            self._made[plan.step] = self._layouts.plan(batch)
        return asked
