"""One batch on its way through the schedule, with the subsets of its rows and what it cost to move them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Generic, TypeVar

import torch
from torch import Tensor

from freescale.comm.traffic import Route
from freescale.embedding import Lookup, Request, RowSubset, ShardedEmbedding
from freescale.pipeline.streams import Waitable, record_stream, wait_for

B = TypeVar("B")

_ID_BYTES = 8


@dataclass
class Traffic:
    """What one step moved on this rank; sums over ranks are those of the step.

    Args:
        unique_rows: unique rows the batch asked for.
        shared_rows: those among them that the batch before used, too, on any rank.
        parked_rows: rows whose gradients travel under the next batch.
        exposed_bytes: sent and received while the rank stood still.
        hidden_bytes: sent and received under compute.
        exposed_ms: time the rank stood still for rows, gradients and ids, or prepared them.
        split_ms: time of the communication thread to find and tell the shared rows.
    """

    unique_rows: float = 0
    shared_rows: float = 0
    parked_rows: float = 0
    exposed_bytes: float = 0
    hidden_bytes: float = 0
    exposed_ms: float = 0
    split_ms: float = 0

    def values(self) -> list[float]:
        """All numbers, in the order of the fields."""
        return [float(getattr(self, each.name)) for each in fields(self)]

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """The rank stands still inside, for rows, gradients or ids, or prepares them."""
        began = time.perf_counter()
        yield
        self.exposed_ms += 1000 * (time.perf_counter() - began)

    @property
    def overlap(self) -> float:
        """Share of the unique rows that had to wait for the batch before."""
        return self.shared_rows / self.unique_rows if self.unique_rows else 0.0


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


def off_rank_bytes(route: Route, rank: int, row_bytes: int) -> int:
    """Bytes this rank sends and receives when rows travel once; its own rows do not."""
    return row_bytes * (sum(route.send) - route.send[rank] + sum(route.receive) - route.receive[rank])


def count_plain(traffic: Traffic, lookups: Iterable[Lookup], embedding: ShardedEmbedding) -> None:
    """Ids, rows and gradients of a plain step: all of it while the rank stands still."""
    for lookup in lookups:
        if lookup.route is None:
            continue
        stored = embedding.plans[lookup.table].spec.dtype.itemsize
        width = lookup.rows.shape[1] * (stored + lookup.rows.itemsize) + _ID_BYTES
        traffic.unique_rows += len(lookup.unique)
        traffic.exposed_bytes += off_rank_bytes(lookup.route, embedding.rank, width)
