"""The schedules of a training run: batches with their rows come out, gradients go in.

The plain schedule does the stages of one batch one after the other:

    load ──> find rows ──> gather them ──> [forward, backward: the model's] ──> send gradients home, update rows

On one GPU a thread loads and finds rows ahead of the compute (`loading/ahead.py`); values of rows are read in turn.
`PrioritizedSchedule` (`prioritized/schedule.py`) moves rows and gradients under the compute of other batches. It must
give exactly the same rows, losses and updates as the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch

from freescale.balance import StepPlan
from freescale.data import SequenceBatch
from freescale.embedding import IdMap, Lookup, ShardedEmbedding, UniqueRows
from freescale.kernels import SequenceLayout
from freescale.pipeline.ids.batch_rows import NO_ROWS, TABLE, find_rows
from freescale.pipeline.ids.feature_ids import FeatureIds
from freescale.pipeline.ids.row_finder import RowFinder
from freescale.pipeline.loading.ahead import Ahead, ReadAhead
from freescale.pipeline.loading.layouts import LayoutPlanner, PreparedLayouts
from freescale.pipeline.loading.loader import LoadedBatches, PlannedBatch
from freescale.pipeline.loading.parcel_loader import ParcelLoader
from freescale.pipeline.padding.padded_batch import PaddedBatch
from freescale.pipeline.padding.padder import Padder
from freescale.pipeline.streams import record_stream
from freescale.pipeline.traffic import Traffic, count_plain


@dataclass(frozen=True)
class ReadyBatch:
    """A batch on its device together with the rows it needs.

    Args:
        plan: what the whole step consists of.
        batch: carries "item_index", "target_index" and "negative_index": indices into `lookup.rows`.
        lookup: the unique rows; none where items have no table.
        traffic: what the step moves between ranks; complete after the update.
        loaded: the batch as it came from the loader, on the CPU.
        layouts: of its micro-batches, where they were made ahead.
        padded: the same in a fixed size, where batches are padded; then `batch` is on the CPU.
        lookups: the unique rows of all tables, `lookup` among them.
    """

    plan: StepPlan
    batch: SequenceBatch
    lookup: Lookup
    traffic: Traffic = field(default_factory=Traffic)
    loaded: SequenceBatch | None = None
    layouts: tuple[SequenceLayout, ...] = ()
    padded: PaddedBatch | None = None
    lookups: Mapping[str, Lookup] = field(default_factory=dict)


class Schedule(Protocol):
    """What the training loop sees of a schedule."""

    def __iter__(self) -> Iterator[ReadyBatch]:
        """Batches with their rows; take the next one only after `update` of the last."""

    def update(self, ready: ReadyBatch, *, lr: float) -> None:
        """Send the gradients of a batch home and update its rows, now or before anybody reads them."""

    def flush(self) -> None:
        """Bring every row up to date: before an evaluation, a checkpoint, the end."""

    def __enter__(self) -> Self:
        """Close the schedule at the end of the block."""

    def __exit__(self, *error: Any) -> None:
        """Flush and stop, or only stop after an error."""


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A batch of which all is known but the values of its rows.

    Args:
        planned: as it came from the loader.
        batch: on its device, with indices instead of ids.
        found: its unique rows by table; none where items have no table.
        traffic: what that has cost the training thread.
        layouts: of its micro-batches, made by another thread.
        padded: of `ReadyBatch`.
    """

    planned: PlannedBatch
    batch: SequenceBatch
    found: Mapping[str, UniqueRows]
    traffic: Traffic
    layouts: PreparedLayouts = field(default_factory=PreparedLayouts)
    padded: PaddedBatch | None = None

    def record_stream(self) -> None:
        """This stream uses what another one has copied to the device."""
        for found in self.found.values():
            record_stream(found.unique)
            record_stream(found.inverse)
        for tensor in self.batch.features():
            record_stream(tensor)
        self.layouts.record_stream()
        if self.padded is not None:
            self.padded.record_stream()


class PlainSchedule:
    """Looks rows up right before they are needed and updates them right after.

    Args:
        batches: planned batches in step order; or such that processes have made ready.
        embedding: the item table.
        id_map: raw ids to rows.
        device: where the model computes.
        ahead: a thread loads batches and finds their rows while others compute; one rank only. A map that learns ids
            must guard the rows of `ahead.AHEAD` batches.
        first_step: number of the first batch.
        look_past: of `Ahead`.
        layouts: makes the layouts of batches, in the thread; without one it is left to the model.
        padder: pads batches; ids must become rows on the CPU.
        rows_in_step: padded batches come without rows: their steps read and update them by themselves.
        features: ids of features; without them batches ask for items alone.
    """

    def __init__(
        self,
        batches: Iterator[PlannedBatch] | ParcelLoader,
        *,
        embedding: ShardedEmbedding,
        id_map: IdMap,
        device: torch.device,
        ahead: bool = False,
        first_step: int = 0,
        look_past: Callable[[int], bool] = lambda step: True,
        layouts: LayoutPlanner | None = None,
        padder: Padder | None = None,
        rows_in_step: bool = False,
        features: FeatureIds | None = None,
    ) -> None:
        self._batches = batches
        self._rows_in_step = rows_in_step
        self._padder = padder
        self._embedding = embedding
        self._id_map = id_map
        self._features = features
        self._finder = RowFinder.of(embedding, id_map, features)
        self._device = device
        self._layouts = layouts if ahead else None
        self._ahead = None
        self._reader: ReadAhead[PlannedBatch] | None = None
        if ahead and not isinstance(batches, ParcelLoader):
            self._reader = ReadAhead(batches)
        if ahead:
            self._ahead = Ahead(self._prepare, device=device, first_step=first_step, look_past=look_past)

    def __iter__(self) -> Iterator[ReadyBatch]:
        """Batches with their rows; take the next one only after `update` of the last."""
        for prepared in iter(self._prepare, None) if self._ahead is None else self._ahead:
            if self._ahead is not None:
                prepared.record_stream()
            (plan, loaded), traffic = prepared.planned, prepared.traffic
            with traffic.exposed():
                lookups = self._embedding.lookups(prepared.found) if prepared.found else {}
            yield ReadyBatch(
                plan,
                prepared.batch,
                lookups.get(TABLE, NO_ROWS),
                traffic,
                loaded=loaded,
                layouts=prepared.layouts.parts,
                padded=prepared.padded,
                lookups=lookups,
            )

    def update(self, ready: ReadyBatch, *, lr: float) -> None:
        """Send the gradients of a batch home and update its rows."""
        if not ready.lookups:
            return  # there are no tables, or the step has updated them
        lookups = list(ready.lookups.values())
        with ready.traffic.exposed():
            self._embedding.update_all(lookups, lr=lr, step=ready.plan.step + 1)
        count_plain(ready.traffic, lookups, self._embedding)

    def flush(self) -> None:
        """Bring every row up to date; here they always are. Afterwards nothing reads the data set."""
        if self._ahead is not None:
            self._ahead.wait_until_idle()
        if self._reader is not None:
            self._reader.wait_until_idle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._ahead is not None:
            self._ahead.close()
        if self._reader is not None:
            self._reader.close()
        end_loading(self._batches, error)

    def _prepare(self) -> _Prepared | None:
        """The next batch, as far as it follows from ids; reads no values of rows."""
        if isinstance(self._batches, ParcelLoader):
            parcel = self._batches.next()
            if parcel is None:
                return None
            return self._with_padded(PlannedBatch(parcel.plan, parcel.batch), parcel.padded, Traffic())
        planned = next(self._batches, None) if self._reader is None else self._reader.next()
        if planned is None:
            return None
        plan, batch = planned
        traffic = Traffic()
        if self._padder is not None:
            return self._pad(planned, self._padder, traffic)
        with traffic.exposed() if self._ahead is None else nullcontext():
            found, indexed = find_rows(
                batch, self._embedding, self._id_map, self._device, step=plan.step, features=self._features
            )
        layouts = PreparedLayouts() if self._layouts is None else self._layouts.plan(batch)
        return _Prepared(planned, indexed, found, traffic, layouts)

    def _pad(self, planned: PlannedBatch, padder: Padder, traffic: Traffic) -> _Prepared:
        """The same in a fixed size: features and lists go to the device in one piece, unique rows beside it."""
        plan, batch = planned
        with traffic.exposed() if self._ahead is None else nullcontext():
            found = self._finder.find(batch, step=plan.step)
            padded = padder.pad(*found, global_tokens=plan.divisor, step=plan.step)
        return self._with_padded(planned, padded, traffic)

    def _with_padded(self, planned: PlannedBatch, padded: PaddedBatch, traffic: Traffic) -> _Prepared:
        found = {}
        if not self._rows_in_step:
            # Nobody asks for the indices: the padded batch has them.
            found = {name: UniqueRows(rows, rows[:0]) for name, rows in padded.unique.items()}
        return _Prepared(planned, planned.batch, found, traffic, padded=padded)


def end_loading(batches: Iterator[PlannedBatch] | ParcelLoader, error: Sequence[Any]) -> None:
    """A schedule left before its last batch ends its loader processes; after an error they end with this one."""
    if isinstance(batches, ParcelLoader):
        batches.close()
    if isinstance(batches, LoadedBatches) and not any(error):
        batches.close()
