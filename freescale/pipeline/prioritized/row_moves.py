"""The stages that move rows, gradients and ids of one batch. `pipeline.py` says when each of them runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from freescale.comm import Transport
from freescale.comm.traffic import (
    Bundle,
    Carry,
    Channels,
    Deadline,
    Relay,
    Route,
    TrafficQueue,
    TravelOrder,
    carry_to_askers,
    carry_to_owners,
)
from freescale.embedding import Lookup, RowSubset, ShardedEmbedding, exchange_all_ids, find_overlaps
from freescale.kernels.runtime import on_device, to_host
from freescale.pipeline.prioritized.in_flight import InFlightBatch, TableFlight
from freescale.pipeline.prioritized.order_check import RowOrder
from freescale.pipeline.streams import BackgroundExecutor, CopyStream, record_stream
from freescale.pipeline.traffic import ID_BYTES, Traffic, served_bytes, travelled_bytes
from freescale.trace import compute, stage

B = TypeVar("B")

_COUNT_BYTES = 16


class UrgentGradients(NamedTuple):
    """What the next batch depends on.

    Args:
        subsets: which rows, by table.
        values: their gradients.
        left: gradients of tables of which others are to be sent later, whole.
    """

    subsets: list[RowSubset]
    values: list[Tensor]
    left: dict[str, Tensor]


class RowMoves:
    """Moves what belongs to sharded tables.

    Args:
        embedding: the tables.
        channels: connections; with some inside a node, rows are asked for once a node.
        queue: whose gate is shut while a rank stands still for rows.
        side: where bulk travels.
        order: hears of every read and update.
    """

    def __init__(
        self,
        embedding: ShardedEmbedding,
        *,
        channels: Channels,
        queue: TrafficQueue,
        side: BackgroundExecutor,
        order: RowOrder,
    ) -> None:
        self._embedding = embedding
        self._channels, self._queue, self._side = channels, queue, side
        self._order = order
        self._copies = CopyStream(embedding.device)
        self._orders: dict[str, TravelOrder] = {}
        if embedding.stages is not None:
            assert channels.inside is not None, "rows of these tables travel once a node"
            groups, plans = embedding.stages.groups, embedding.plans.items()
            self._orders = {name: TravelOrder(groups, block_rows=plan.block_rows) for name, plan in plans}

    # On the communication thread, two batches ahead.

    def send_ids(self, flight: InFlightBatch[B], before: InFlightBatch[B] | None) -> None:
        """Tell the owners what a batch needs, and split it against the batch before."""
        with self._copies.copies():
            self._send_ids(flight, before)
        flight.copied = self._copies.there()

    def _send_ids(self, flight: InFlightBatch[B], before: InFlightBatch[B] | None) -> None:
        asked = {name: rows for name, rows in sorted(flight.asked.items()) if self._travels(name)}
        if not asked:
            return
        self._queue.gate.wait(Deadline.IDS)
        with stage("exchange ids", step=flight.step + 1):
            plans, rows = [self._embedding.plan_of(name) for name in asked], map(to_host, asked.values())
            requests = exchange_all_ids(
                plans,
                list(rows),
                channel=self._channels.ids,
                inside=self._inside_ids,
                orders=[self._orders[name] for name in asked] if self._orders else (),
            )
        for request in requests:
            self._order.uses(flight.step, request.table, request.owned.unique)
            inverse = on_device(request.inverse, self._embedding.device)
            flight.tables[request.table] = TableFlight(request, early=request.whole(), inverse=inverse)
        with stage("split into OL and NOL", step=flight.step + 1):
            began = time.perf_counter()
            if before is not None and before.tables:
                self._split(before, flight)
            flight.traffic.split_ms += 1000 * (time.perf_counter() - began)
        for name, table in flight.tables.items():
            self._to_device(table)
            self._count_ids(flight, name)

    @property
    def _inside_ids(self) -> Transport | None:
        return None if self._channels.inside is None else self._channels.inside.ids

    def _travels(self, name: str) -> bool:
        return not self._embedding.plan_of(name).replicated

    def _split(self, before: InFlightBatch[B], after: InFlightBatch[B]) -> None:
        """Mark what two batches share: it waits in one and hurries in the other."""
        names = [name for name in after.tables if name in before.tables]
        pairs = [(before.tables[name].request, after.tables[name].request) for name in names]
        found = find_overlaps(pairs, channel=self._channels.ids, inside=self._inside_ids)
        for name, (first, second) in zip(names, found):
            earlier, later = before.tables[name], after.tables[name]
            urgent, parked = earlier.request.split(first)
            later.late, later.early = later.request.split(second)
            earlier.urgent, earlier.parked = self._for_update(urgent, name), self._for_update(parked, name)

    def _to_device(self, table: TableFlight) -> None:
        device = self._embedding.device
        table.early = table.early.to(device)
        if table.late is not None:
            table.late = table.late.to(device)

    # Beside the training thread, under the compute of another batch.

    def fetch_early(self, flight: InFlightBatch[B]) -> dict[str, Tensor]:
        """Fetch the rows the batch before does not touch; storage for all rows of the batch, by table."""
        if not flight.tables:
            return {}
        storage = {}
        with stage("fetch NOL rows", step=flight.step + 1):
            subsets = [table.early for table in flight.tables.values()]
            with compute("gather rows"):
                leaving = [
                    self._gather(flight, name, subset, "fetch NOL rows")
                    for name, subset in zip(flight.tables, subsets)
                ]
            arrived = carry_to_askers(
                leaving, *_hops(subsets), self._bulk(flight, list(flight.tables), deadline=Deadline.NOL_ROWS)
            )
            for (name, table), rows in zip(flight.tables.items(), arrived):
                storage[name] = rows
                if table.late is not None or table.early.relay is not None:
                    with compute("place rows"):
                        storage[name] = rows.new_empty(len(table.request.unique), rows.shape[1])
                        storage[name].index_copy_(0, record_stream(table.early.index), rows)
                self._count(flight.traffic, name, table.early, rows, exposed=not flight.hidden)
        return storage

    def send_parked(self, flight: InFlightBatch[B], grads: dict[str, Tensor], *, lr: float) -> None:
        """Send gradients home that the next batch does not depend on, and apply them as those of their own step."""
        subsets = [subset for name in grads if (subset := flight.tables[name].parked) is not None]
        with stage("send NOL gradients", step=flight.step + 1):
            leaving = [
                record_stream(grad).index_select(0, record_stream(subset.index))
                for grad, subset in zip(grads.values(), subsets, strict=True)
            ]
            arrived = carry_to_owners(
                leaving, *_hops(subsets), self._bulk(flight, list(grads), deadline=Deadline.NOL_GRADIENTS)
            )
        with stage("apply NOL gradients", step=flight.step + 1), compute("update rows"):
            for name, subset, home in zip(grads, subsets, arrived):
                self._apply(flight, name, subset, home, lr=lr)

    # On the training thread, which stands still meanwhile; or beside it, where it has weight gradients to compute. Then
    # `beside` is what has travelled so: the batch's own account belongs to the training thread.

    def fetch_late(
        self, flight: InFlightBatch[B], storage: dict[str, Tensor], beside: Traffic | None = None
    ) -> None:
        """Fetch the rows the batch before has just updated."""
        late = {name: table.late for name, table in flight.tables.items() if table.late is not None}
        if not late:
            return
        with self._queue.gate.urgent(Deadline.OL_ROWS), stage("fetch OL rows", step=flight.step + 1):
            leaving = []
            with compute("gather rows"):
                for name, subset in late.items():
                    leaving.append(self._gather(flight, name, subset, "fetch OL rows"))
                    self._count(beside or flight.traffic, name, subset, leaving[-1], exposed=beside is None)
            arrived = carry_to_askers(leaving, *_hops(list(late.values())), self._express)
            with compute("place rows"):
                for (name, subset), rows in zip(late.items(), arrived):
                    record_stream(storage[name]).index_copy_(0, subset.index, rows)

    def pick_urgent(self, flight: InFlightBatch[B], lookups: dict[str, Lookup]) -> UrgentGradients:
        """The gradients that the next batch depends on, picked out of those of a batch."""
        picked = UrgentGradients([], [], {})
        with compute("pick gradients"):
            for name, table in flight.tables.items():
                grad = record_stream(lookups[name].gradient())
                subset = table.urgent
                if subset is None:
                    subset = self._for_update(table.request.whole(), name)
                    whole = subset.relay is None
                    picked.values.append(grad if whole else grad.index_select(0, record_stream(subset.index)))
                else:
                    picked.left[name] = grad
                    picked.values.append(grad.index_select(0, record_stream(subset.index)))
                picked.subsets.append(subset)
        return picked

    def send_urgent(
        self,
        flight: InFlightBatch[B],
        picked: UrgentGradients,
        *,
        lr: float,
        beside: Traffic | None = None,
    ) -> dict[str, Tensor]:
        """Send home and apply what was picked; the gradients that are left to send."""
        if not flight.tables:
            return {}
        gate, account = self._queue.gate, beside or flight.traffic
        with gate.urgent(Deadline.OL_GRADIENTS), stage("send OL gradients", step=flight.step + 1):
            for (name, table), subset, values in zip(flight.tables.items(), picked.subsets, picked.values):
                record_stream(values)
                if name in picked.left:
                    assert table.parked is not None
                    # They travel when this step has been reported, but they are its own.
                    self._count(account, name, table.parked, values, exposed=False)
                self._count(account, name, subset, values, exposed=beside is None)
            arrived = carry_to_owners(picked.values, *_hops(picked.subsets), self._express)
        with stage("apply OL gradients", step=flight.step + 1), compute("update rows"):
            for name, subset, home in zip(flight.tables, picked.subsets, arrived):
                self._apply(flight, name, subset, home, lr=lr)
        return picked.left

    # What the stages share.

    def _express(
        self, values: Sequence[Tensor], send: Sequence[list[int]], receive: Sequence[list[int]], inside: bool
    ) -> list[Tensor]:
        """Move what is urgent of several tables in one transfer."""
        bundle = Bundle.of(values, send=send, receive=receive)
        return bundle.start(self._hop(inside).express).wait()

    def _bulk(self, flight: InFlightBatch[B], names: list[str], *, deadline: Deadline) -> Carry:
        """Moves bulk of these tables in one transfer, from inside a job."""
        requests = [flight.tables[name].request for name in names]

        def carry(
            values: Sequence[Tensor],
            send: Sequence[list[int]],
            receive: Sequence[list[int]],
            inside: bool,
        ) -> list[Tensor]:
            routes = [each.relay.route if inside and each.relay else each.route for each in requests]
            largest = [route.largest for route in routes]
            bundle = Bundle.of(values, send=send, receive=receive, largest=largest)
            arrived = self._side.send(
                self._hop(inside).bulk,
                bundle.message,
                deadline=deadline,
                send=bundle.send,
                receive=bundle.receive,
                largest=bundle.largest,
            )
            return bundle.open(arrived)

        return carry

    def _hop(self, inside: bool) -> Channels:
        """The connections to relays of this node, or to the owners."""
        return self._channels.inside if inside and self._channels.inside else self._channels

    def _for_update(self, subset: RowSubset, name: str) -> RowSubset:
        """Where the table lives, in the form its update takes."""
        device = self._embedding.device
        fused = self._embedding.tables[name].not_fused is None
        return subset.planned(device) if fused else subset.to(device)

    def _gather(self, flight: InFlightBatch[B], name: str, subset: RowSubset, where: str) -> Tensor:
        self._order.read(flight.step, name, subset.owned.wanted, stage=where)
        if subset.relay is not None:
            record_stream(subset.relay.inverse)
        return self._embedding.tables[name].gather(record_stream(subset.owned.wanted))

    def _apply(
        self, flight: InFlightBatch[B], name: str, subset: RowSubset, home: Tensor, *, lr: float
    ) -> None:
        # What arrives stands in rank order, and so it is added up: as without subsets.
        owned = subset.owned
        for tensor in subset.tensors():
            record_stream(tensor)
        table = self._embedding.tables[name]
        if subset.plan is not None:
            table.apply_sums(subset.plan, home, lr=lr, step=flight.step + 1)
        else:
            table.apply(owned.unique, owned.sum(home), lr=lr, step=flight.step + 1)
        self._order.updated(flight.step, name, owned.unique, stage="apply gradients")

    def _count(self, traffic: Traffic, name: str, subset: RowSubset, rows: Tensor, *, exposed: bool) -> None:
        row_bytes = rows.shape[1] * rows.itemsize
        count = travelled_bytes(subset.route, subset.relay, self._embedding, row_bytes)
        traffic.of(name).moved(count, exposed=exposed)

    def _count_ids(self, flight: InFlightBatch[B], name: str) -> None:
        table, embedding = flight.tables[name], self._embedding
        request, traffic = table.request, flight.traffic.of(name)
        traffic.unique_rows += len(request.unique)
        spec = self._embedding.plan_of(name).spec
        row_bytes = spec.dim * spec.dtype.itemsize
        flight.traffic.served_bytes += served_bytes(request.route, embedding, row_bytes)
        traffic.shared_rows += 0 if table.late is None else len(table.late.index)
        hops = [request.route] if request.relay is None else [request.route, request.relay.route]
        moved = travelled_bytes(request.route, request.relay, embedding, ID_BYTES)
        moved += sum(2 * _COUNT_BYTES * (len(hop.send) - 1) for hop in hops)
        if table.late is not None:
            # Two masks, this batch's and the one before's, of about as many bits.
            moved += travelled_bytes(request.route, request.relay, embedding, 1) // 4
        traffic.moved(moved, exposed=not flight.hidden)


def _hops(subsets: Sequence[RowSubset]) -> tuple[list[Route], list[Relay | None]]:
    """Between relays, or askers, and owners; and those who collect rows for a node, where there are some."""
    return [subset.route for subset in subsets], [subset.relay for subset in subsets]
