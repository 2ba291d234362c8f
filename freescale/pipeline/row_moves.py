"""The stages that move rows, gradients and ids of one batch. `prioritized.py` says when each of them runs."""

from __future__ import annotations

import time
from typing import TypeVar

from torch import Tensor

from freescale.comm.traffic import Channels, Deadline, TrafficQueue
from freescale.embedding import Lookup, RowSubset, ShardedEmbedding, exchange_ids, find_overlap
from freescale.kernels.runtime import on_device, to_host
from freescale.pipeline.in_flight import InFlightBatch, TableFlight, off_rank_bytes
from freescale.pipeline.order_check import RowOrder
from freescale.pipeline.streams import BackgroundExecutor, CopyStream, record_stream
from freescale.trace import compute, stage

B = TypeVar("B")

_ID_BYTES, _COUNT_BYTES = 8, 16


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
        for name, rows in sorted(flight.asked.items()):
            plan = self._embedding.plan_of(name)
            if plan.replicated:
                continue
            self._queue.gate.wait(Deadline.IDS)
            with stage("exchange ids", step=flight.step + 1):
                request = exchange_ids(plan, to_host(rows), channel=self._channels.ids)
                self._order.uses(flight.step, name, request.owned.unique)
            inverse = on_device(request.inverse, self._embedding.device)
            flight.tables[name] = TableFlight(request, early=request.whole(), inverse=inverse)
            neighbour = None if before is None else before.tables.get(name)
            with stage("split into OL and NOL", step=flight.step + 1):
                began = time.perf_counter()
                if neighbour is not None:
                    self._split(neighbour, flight.tables[name])
                flight.traffic.split_ms += 1000 * (time.perf_counter() - began)
            self._to_device(flight.tables[name])
            self._count_ids(flight, name)

    def _split(self, before: TableFlight, after: TableFlight) -> None:
        """Mark what two batches share: it waits in one and hurries in the other."""
        first, second = find_overlap(before.request, after.request, channel=self._channels.ids)
        before.urgent, before.parked = before.request.split(first)
        after.late, after.early = after.request.split(second)
        before.urgent = self._for_update(before.urgent, before.request.table)
        before.parked = self._for_update(before.parked, before.request.table)

    def _to_device(self, table: TableFlight) -> None:
        device = self._embedding.device
        table.early = table.early.to(device)
        if table.late is not None:
            table.late = table.late.to(device)

    # Beside the training thread, under the compute of another batch.

    def fetch_early(self, flight: InFlightBatch[B]) -> dict[str, Tensor]:
        """Fetch the rows the batch before does not touch; storage for all rows of the batch, by table."""
        storage = {}
        with stage("fetch NOL rows", step=flight.step + 1):
            for name, table in flight.tables.items():
                subset = table.early
                leaving = self._gather(flight, name, subset, "fetch NOL rows")
                arrived = self._side.send(
                    self._channels.bulk,
                    leaving,
                    deadline=Deadline.NOL_ROWS,
                    send=subset.route.receive,
                    receive=subset.route.send,
                    largest=table.request.route.largest,
                )
                if table.late is None:
                    storage[name] = arrived
                else:
                    storage[name] = leaving.new_empty(len(table.request.unique), leaving.shape[1])
                    storage[name].index_copy_(0, record_stream(subset.index), arrived)
                self._count(flight, subset, leaving, exposed=not flight.hidden)
        return storage

    def send_parked(self, flight: InFlightBatch[B], grads: dict[str, Tensor], *, lr: float) -> None:
        """Send gradients home that the next batch does not depend on, and apply them as those of their own step."""
        for name, grad in grads.items():
            table, subset = flight.tables[name], flight.tables[name].parked
            assert subset is not None
            with stage("send NOL gradients", step=flight.step + 1):
                leaving = record_stream(grad).index_select(0, record_stream(subset.index))
                home = self._side.send(
                    self._channels.bulk,
                    leaving,
                    deadline=Deadline.NOL_GRADIENTS,
                    send=subset.route.send,
                    receive=subset.route.receive,
                    largest=table.request.route.largest,
                )
            with stage("apply NOL gradients", step=flight.step + 1):
                self._apply(flight, name, subset, home, lr=lr)

    # On the training thread, which stands still meanwhile.

    def fetch_late(self, flight: InFlightBatch[B], storage: dict[str, Tensor]) -> None:
        """Fetch the rows the batch before has just updated."""
        coming = []
        with self._queue.gate.urgent(Deadline.OL_ROWS), stage("fetch OL rows", step=flight.step + 1):
            for name, table in flight.tables.items():
                subset = table.late
                if subset is not None:
                    leaving = self._gather(flight, name, subset, "fetch OL rows")
                    self._count(flight, subset, leaving, exposed=True)
                    pending = subset.route.to_askers(leaving, channel=self._channels.express)
                    coming.append((storage[name], subset, pending))
            for rows, subset, pending in coming:
                rows.index_copy_(0, subset.index, pending.wait())

    def send_urgent(
        self, flight: InFlightBatch[B], lookups: dict[str, Lookup], *, lr: float
    ) -> dict[str, Tensor]:
        """Send gradients home that the next batch depends on, and apply them; the gradients that are left to send."""
        coming, left = [], {}
        gate = self._queue.gate
        with gate.urgent(Deadline.OL_GRADIENTS), stage("send OL gradients", step=flight.step + 1):
            for name, table in flight.tables.items():
                grad = lookups[name].gradient()
                subset = table.urgent
                if subset is None:
                    subset = self._for_update(table.request.whole(), name)
                    leaving = grad
                else:
                    left[name] = grad
                    leaving = grad.index_select(0, subset.index)
                    assert table.parked is not None
                    # They travel when this step has been reported, but they are its own.
                    self._count(flight, table.parked, grad, exposed=False)
                self._count(flight, subset, leaving, exposed=True)
                pending = subset.route.to_owners(leaving, channel=self._channels.express)
                coming.append((name, subset, pending))
            arrived = [(name, subset, pending.wait()) for name, subset, pending in coming]
        with stage("apply OL gradients", step=flight.step + 1):
            for name, subset, home in arrived:
                self._apply(flight, name, subset, home, lr=lr)
        return left

    # What the stages share.

    def _for_update(self, subset: RowSubset, name: str) -> RowSubset:
        """Where the table lives, in the form its update takes."""
        device = self._embedding.device
        fused = self._embedding.tables[name].not_fused is None
        return subset.planned(device) if fused else subset.to(device)

    def _gather(self, flight: InFlightBatch[B], name: str, subset: RowSubset, where: str) -> Tensor:
        self._order.read(flight.step, name, subset.owned.wanted, stage=where)
        with compute("gather rows"):
            return self._embedding.tables[name].gather(record_stream(subset.owned.wanted))

    def _apply(
        self, flight: InFlightBatch[B], name: str, subset: RowSubset, home: Tensor, *, lr: float
    ) -> None:
        # What arrives stands in rank order, and so it is added up: as without subsets.
        owned = subset.owned
        for tensor in subset.tensors():
            record_stream(tensor)
        table = self._embedding.tables[name]
        with compute("update rows"):
            if subset.plan is not None:
                table.apply_sums(subset.plan, home, lr=lr, step=flight.step + 1)
            else:
                table.apply(owned.unique, owned.sum(home), lr=lr, step=flight.step + 1)
        self._order.updated(flight.step, name, owned.unique, stage="apply gradients")

    def _count(self, flight: InFlightBatch[B], subset: RowSubset, rows: Tensor, *, exposed: bool) -> None:
        count = off_rank_bytes(subset.route, self._embedding.rank, rows.shape[1] * rows.itemsize)
        if exposed:
            flight.traffic.exposed_bytes += count
        else:
            flight.traffic.hidden_bytes += count

    def _count_ids(self, flight: InFlightBatch[B], name: str) -> None:
        table, rank = flight.tables[name], self._embedding.rank
        request, traffic = table.request, flight.traffic
        traffic.unique_rows += len(request.unique)
        traffic.shared_rows += 0 if table.late is None else len(table.late.index)
        moved = off_rank_bytes(request.route, rank, _ID_BYTES)
        moved += 2 * _COUNT_BYTES * (len(request.route.send) - 1)
        if table.late is not None:
            # Two masks, this batch's and the one before's, of about as many bits.
            moved += off_rank_bytes(request.route, rank, 1) // 4
        if flight.hidden:
            traffic.hidden_bytes += moved
        else:
            traffic.exposed_bytes += moved
