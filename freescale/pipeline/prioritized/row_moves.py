"""The stages that move rows, gradients and ids of one batch. `pipeline.py` says when each of them runs."""

from __future__ import annotations

import time
from typing import TypeVar

from torch import Tensor

from freescale.comm.traffic import Bundle, Channels, Deadline, TrafficQueue
from freescale.embedding import Lookup, RowSubset, ShardedEmbedding, exchange_all_ids, find_overlaps
from freescale.kernels.runtime import on_device, to_host
from freescale.pipeline.prioritized.in_flight import InFlightBatch, TableFlight
from freescale.pipeline.prioritized.order_check import RowOrder
from freescale.pipeline.streams import BackgroundExecutor, CopyStream, record_stream
from freescale.pipeline.traffic import ID_BYTES, Traffic, off_rank_bytes, served_bytes
from freescale.trace import compute, stage

B = TypeVar("B")

_COUNT_BYTES = 16


class RowMoves:
    """Moves what belongs to sharded tables.

    Args:
        embedding: the tables.
        channels: connections.
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
            requests = exchange_all_ids(plans, list(rows), channel=self._channels.ids)
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

    def _travels(self, name: str) -> bool:
        return not self._embedding.plan_of(name).replicated

    def _split(self, before: InFlightBatch[B], after: InFlightBatch[B]) -> None:
        """Mark what two batches share: it waits in one and hurries in the other."""
        names = [name for name in after.tables if name in before.tables]
        pairs = [(before.tables[name].request, after.tables[name].request) for name in names]
        for name, (first, second) in zip(names, find_overlaps(pairs, channel=self._channels.ids)):
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
            arrived = self._send(
                leaving,
                [subset.route.receive for subset in subsets],
                [subset.route.send for subset in subsets],
                flight,
                list(flight.tables),
                deadline=Deadline.NOL_ROWS,
            )
            for (name, table), rows in zip(flight.tables.items(), arrived):
                storage[name] = rows
                if table.late is not None:
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
            arrived = self._send(
                leaving,
                [subset.route.send for subset in subsets],
                [subset.route.receive for subset in subsets],
                flight,
                list(grads),
                deadline=Deadline.NOL_GRADIENTS,
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
            routes = [subset.route for subset in late.values()]
            bundle = Bundle.of(
                leaving, send=[route.receive for route in routes], receive=[route.send for route in routes]
            )
            arrived = bundle.start(self._channels.express).wait()
            for (name, subset), rows in zip(late.items(), arrived):
                record_stream(storage[name]).index_copy_(0, subset.index, rows)

    def send_urgent(
        self,
        flight: InFlightBatch[B],
        lookups: dict[str, Lookup],
        *,
        lr: float,
        beside: Traffic | None = None,
    ) -> dict[str, Tensor]:
        """Send gradients home that the next batch depends on, and apply them; the gradients that are left to send."""
        if not flight.tables:
            return {}
        urgent, leaving, left = [], [], {}
        gate, account = self._queue.gate, beside or flight.traffic
        with gate.urgent(Deadline.OL_GRADIENTS), stage("send OL gradients", step=flight.step + 1):
            for name, table in flight.tables.items():
                grad = record_stream(lookups[name].gradient())
                subset = table.urgent
                if subset is None:
                    subset = self._for_update(table.request.whole(), name)
                    leaving.append(grad)
                else:
                    left[name] = grad
                    leaving.append(grad.index_select(0, subset.index))
                    assert table.parked is not None
                    # They travel when this step has been reported, but they are its own.
                    self._count(account, name, table.parked, grad, exposed=False)
                self._count(account, name, subset, grad, exposed=beside is None)
                urgent.append(subset)
            bundle = Bundle.of(
                leaving,
                send=[subset.route.send for subset in urgent],
                receive=[subset.route.receive for subset in urgent],
            )
            arrived = bundle.start(self._channels.express).wait()
        with stage("apply OL gradients", step=flight.step + 1), compute("update rows"):
            for name, subset, home in zip(flight.tables, urgent, arrived):
                self._apply(flight, name, subset, home, lr=lr)
        return left

    # What the stages share.

    def _send(
        self,
        leaving: list[Tensor],
        send: list[list[int]],
        receive: list[list[int]],
        flight: InFlightBatch[B],
        names: list[str],
        *,
        deadline: Deadline,
    ) -> list[Tensor]:
        """Move bulk of several tables in one transfer, from inside a job."""
        largest = [flight.tables[name].request.route.largest for name in names]
        bundle = Bundle.of(leaving, send=send, receive=receive, largest=largest)
        arrived = self._side.send(
            self._channels.bulk,
            bundle.message,
            deadline=deadline,
            send=bundle.send,
            receive=bundle.receive,
            largest=bundle.largest,
        )
        return bundle.open(arrived)

    def _for_update(self, subset: RowSubset, name: str) -> RowSubset:
        """Where the table lives, in the form its update takes."""
        device = self._embedding.device
        fused = self._embedding.tables[name].not_fused is None
        return subset.planned(device) if fused else subset.to(device)

    def _gather(self, flight: InFlightBatch[B], name: str, subset: RowSubset, where: str) -> Tensor:
        self._order.read(flight.step, name, subset.owned.wanted, stage=where)
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
        count = off_rank_bytes(subset.route, self._embedding.rank, rows.shape[1] * rows.itemsize)
        traffic.of(name).moved(count, exposed=exposed)

    def _count_ids(self, flight: InFlightBatch[B], name: str) -> None:
        table, rank = flight.tables[name], self._embedding.rank
        request, traffic = table.request, flight.traffic.of(name)
        traffic.unique_rows += len(request.unique)
        spec = self._embedding.plan_of(name).spec
        flight.traffic.served_bytes += served_bytes(request.route, rank, spec.dim * spec.dtype.itemsize)
        traffic.shared_rows += 0 if table.late is None else len(table.late.index)
        moved = off_rank_bytes(request.route, rank, ID_BYTES)
        moved += 2 * _COUNT_BYTES * (len(request.route.send) - 1)
        if table.late is not None:
            # Two masks, this batch's and the one before's, of about as many bits.
            moved += off_rank_bytes(request.route, rank, 1) // 4
        traffic.moved(moved, exposed=not flight.hidden)
