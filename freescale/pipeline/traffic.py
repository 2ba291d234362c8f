"""What a step moved between the ranks, table by table, and how long they stood still for it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from freescale.comm.traffic import Relay, Route
from freescale.embedding import Lookup, ShardedEmbedding

ID_BYTES = 8


@dataclass
class TableTraffic:
    """Of one table, or of all of them.

    Args:
        unique_rows: unique rows the batch asked for.
        shared_rows: those among them that the batch before used, too, on any rank.
        parked_rows: rows whose gradients travel under the next batch.
        exposed_bytes: sent and received while the rank stood still.
        hidden_bytes: sent and received under compute.
    """

    unique_rows: float = 0
    shared_rows: float = 0
    parked_rows: float = 0
    exposed_bytes: float = 0
    hidden_bytes: float = 0

    def numbers(self) -> tuple[float, ...]:
        """All of them, in the order of the fields; `dataclasses.astuple` takes 0.1 ms a table."""
        return (
            self.unique_rows,
            self.shared_rows,
            self.parked_rows,
            self.exposed_bytes,
            self.hidden_bytes,
        )

    @property
    def overlap(self) -> float:
        """Share of the unique rows that had to wait for the batch before."""
        return self.shared_rows / self.unique_rows if self.unique_rows else 0.0

    def moved(self, num_bytes: float, *, exposed: bool) -> None:
        """So many bytes were sent and received."""
        if exposed:
            self.exposed_bytes += num_bytes
        else:
            self.hidden_bytes += num_bytes


@dataclass
class Traffic:
    """What one step moved on this rank; sums over ranks are those of the step.

    Args:
        exposed_ms: time the rank stood still for rows, gradients and ids, or prepared them.
        split_ms: time of the communication thread to find and tell the shared rows.
        tables: of every table whose rows travel.
        served_bytes: of rows that other ranks asked this one for, as their owner, one way.
    """

    exposed_ms: float = 0
    split_ms: float = 0
    tables: dict[str, TableTraffic] = field(default_factory=dict)
    served_bytes: float = 0

    def of(self, table: str) -> TableTraffic:
        """That of one table, to be counted up."""
        return self.tables.setdefault(table, TableTraffic())

    def add(self, other: Traffic) -> None:
        """Count up what has travelled elsewhere."""
        self.exposed_ms += other.exposed_ms
        self.split_ms += other.split_ms
        for name, moved in other.tables.items():
            self.tables[name] = TableTraffic(*map(sum, zip(self.of(name).numbers(), moved.numbers())))

    @property
    def total(self) -> TableTraffic:
        """That of all tables."""
        return TableTraffic(*map(sum, zip(*(each.numbers() for each in self.tables.values()))))

    @property
    def overlap(self) -> float:
        """Of all tables."""
        return self.total.overlap

    @property
    def unique_rows(self) -> float:
        """Of all tables."""
        return self.total.unique_rows

    @property
    def shared_rows(self) -> float:
        """Of all tables."""
        return self.total.shared_rows

    @property
    def parked_rows(self) -> float:
        """Of all tables."""
        return self.total.parked_rows

    @property
    def exposed_bytes(self) -> float:
        """Of all tables."""
        return self.total.exposed_bytes

    @property
    def hidden_bytes(self) -> float:
        """Of all tables."""
        return self.total.hidden_bytes

    def values(self, tables: Sequence[str]) -> list[float]:
        """All numbers, those of these tables in their order: as many on every rank."""
        counted = [value for name in tables for value in self.of(name).numbers()]
        return [self.exposed_ms, self.split_ms, *map(float, counted)]

    @classmethod
    def from_values(cls, values: Sequence[float], tables: Sequence[str]) -> Traffic:
        """What `values` has written."""
        exposed_ms, split_ms, *counted = values
        width = len(fields(TableTraffic))
        found = {name: TableTraffic(*counted[n * width : (n + 1) * width]) for n, name in enumerate(tables)}
        return cls(exposed_ms, split_ms, found)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """The rank stands still inside, for rows, gradients or ids, or prepares them."""
        began = time.perf_counter()
        yield
        self.exposed_ms += 1000 * (time.perf_counter() - began)


def off_rank_bytes(route: Route, rank: int, row_bytes: int) -> int:
    """Bytes this rank sends and receives when rows travel once; its own rows do not."""
    return row_bytes * (sum(route.send) - route.send[rank] + sum(route.receive) - route.receive[rank])


def travelled_bytes(route: Route, relay: Relay | None, embedding: ShardedEmbedding, row_bytes: int) -> int:
    """The same; where rows travel once a node, what goes to ranks of this one and what goes to others."""
    if relay is None or embedding.stages is None:
        return off_rank_bytes(route, embedding.rank, row_bytes)
    inside = off_rank_bytes(relay.route, embedding.stages.inside.rank, row_bytes)
    return inside + off_rank_bytes(route, embedding.stages.between.rank, row_bytes)


def served_bytes(route: Route, embedding: ShardedEmbedding, row_bytes: int) -> int:
    """Bytes of rows that this rank sends as their owner; to other nodes alone, where they travel once a node."""
    rank = embedding.rank if embedding.stages is None else embedding.stages.between.rank
    return row_bytes * (sum(route.receive) - route.receive[rank])


def busiest_owner(served: Sequence[float]) -> float:
    """How much more than the mean the busiest owner serves, as a factor; 1 where nobody serves anything."""
    mean = sum(served) / len(served)
    return max(served) / mean if mean else 1.0


def count_plain(traffic: Traffic, lookups: Iterable[Lookup], embedding: ShardedEmbedding) -> None:
    """Ids, rows and gradients of a plain step: all of it while the rank stands still."""
    for lookup in lookups:
        if lookup.route is None:
            continue
        stored = embedding.plans[lookup.table].spec.dtype.itemsize
        width = lookup.rows.shape[1] * (stored + lookup.rows.itemsize) + ID_BYTES
        counted = traffic.of(lookup.table)
        counted.unique_rows += len(lookup.unique)
        traffic.served_bytes += served_bytes(lookup.route, embedding, lookup.rows.shape[1] * stored)
        counted.moved(travelled_bytes(lookup.route, lookup.relay, embedding, width), exposed=True)
