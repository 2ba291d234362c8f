"""One batch on its way through the schedule, with the subsets of its rows and what it cost to move them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from freescale.embedding import Lookup, Request, RowSubset
from freescale.pipeline.streams import Waitable, record_stream, wait_for
from freescale.pipeline.traffic import Traffic

B = TypeVar("B")


@dataclass
class TableFlight:
    """The rows of one batch and table.

    Args:
        request: who asks for what.
        early: rows the batch before does not touch; fetched while it computes.
        late: rows it does touch; fetched after its update. None where there is no batch before.
        urgent: rows the next batch uses, too; their gradients go home at once.
        parked: the others; their gradients go home under the next batch. None where there is none.
        inverse: that of the request, where the model computes.
    """

    request: Request
    early: RowSubset
    inverse: Tensor
    late: RowSubset | None = None
    urgent: RowSubset | None = None
    parked: RowSubset | None = None

    def record_stream(self) -> None:
        """This stream uses what another thread has copied to the device so far."""
        record_stream(self.inverse)
        for subset in (self.early, self.late, self.urgent, self.parked):
            for tensor in () if subset is None else subset.tensors():
                record_stream(tensor)


@dataclass
class InFlightBatch(Generic[B]):
    """One batch.

    Args:
        step: its number, from 0.
        batch: as it came from the loader.
        prioritized: whether its ids went ahead of it.
        hidden: whether another batch computes while its ids and early rows travel.
        ids: done when `tables` is there and, for the batch before, which rows both share.
        copied: when the subsets of `tables`, and those of the batch before, are on the GPU.
        early: done when the early rows are here: storage for all rows by table, filled in part.
        late_rows_here: the rest of it is filled, too.
    """

    step: int
    batch: B
    prioritized: bool
    hidden: bool = True
    ids: Waitable[None] | None = None
    early: Waitable[dict[str, Tensor]] | None = None
    tables: dict[str, TableFlight] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None
    asked: Mapping[str, Tensor] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    updated: bool = False
    late_rows_here: bool = False

    def copied_by(self, later: InFlightBatch[B]) -> None:
        """Let this stream wait for the copies that went with `later`, and use those of this batch."""
        wait_for(later.copied)
        for table in self.tables.values():
            table.record_stream()


@dataclass(frozen=True)
class ReadyRows(Generic[B]):
    """A batch and its rows, ready for the model.

    Args:
        step: its number, from 0.
        batch: as it came from the loader.
        lookups: the unique rows of every table.
        traffic: what the step moves; complete after the update.
    """

    step: int
    batch: B
    lookups: dict[str, Lookup]
    traffic: Traffic

    @property
    def vectors(self) -> dict[str, Tensor]:
        """[..., dim] the vector of each id asked for, differentiable, by table."""
        return {name: lookup.vectors() for name, lookup in self.lookups.items()}
