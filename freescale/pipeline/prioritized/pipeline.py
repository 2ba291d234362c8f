"""Prioritized embedding communication: rows and gradients travel while the model computes, and nothing changes.

Rows of batch n+1 that batch n touches, too, on any rank (overlapped, OL) must wait for n's update. The others (NOL)
need not. So only OL rows and OL gradients travel while the ranks stand still:

                  │<──────────────── step n ────────────────>│<──────────── step n+1 ────────────────
    training      OL rows n ┃ forward n ┃ backward n ┃ OL grads n ┃ OL rows n+1 ┃ forward n+1 ┃ ...
                      ^     ┃                        ┃     │            ^
    communication ┄┄┄┄┼┄┄┄┄┄┃ NOL grads n-1, apply   ┃ ┄┄┄┄│┄┄┄┄┄┄┄┄┄┄┄┄┼┄┄┄┄┄┃ NOL grads n, apply
    (thread or        │     ┃   └> NOL rows n+1 ─────╂─────┼────────────┤     ┃   └> NOL rows n+2
     stream)          │     ┃ ids n+2, split against ┃     │            │     ┃ ids n+3, split ...
                      │     ┃   n+1: one bit a row   ┃     v            │
    tables            └ gather                         apply OL ────────┘

Why this is exact, bit for bit:
  * A row of batch n is wholly OL or wholly NOL with regard to batch n+1, so all its gradients are summed in one
    place, in rank order, and applied once, with the learning rate and step count of its own step.
  * A NOL row of n+1 is not touched by n; if n-1 touched it, it is a NOL row of n-1's gradients, which the communication
    thread has applied before, because it does its jobs in order.
  * An OL row of n+1 is read by the training thread after it has applied OL gradients n. Its update of n-1, if there is
    one, was an OL update, done a step before.
  * Training thread and communication thread work on different rows at any moment.
`order_check.py` checks all of this while a run goes on.

With weight gradients left to compute (`beside`) the training thread does not stand still for OL gradients and rows,
either: `urgent_chain.py` moves them meanwhile, in the same order.

The ids of a batch are two batches ahead of its compute (LOOK_AHEAD). They are turned into rows (`rows_of`) on the
communication thread, in the order of the batches: a map from raw ids to rows that changes as ids come in sees them in
the same order as without look-ahead. It must not give away a row that one of the last LOOK_AHEAD + 1
batches used: gradients of the one before the current may still be parked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from freescale.comm.traffic import Channels, Gate, TrafficQueue, open_channels
from freescale.embedding import Lookup, ShardedEmbedding, as_leaf
from freescale.errors import FreeScaleError
from freescale.kernels.rows import unique
from freescale.pipeline.prioritized.in_flight import InFlightBatch, ReadyRows
from freescale.pipeline.prioritized.order_check import NoCheck, OrderCheck, RowOrder
from freescale.pipeline.prioritized.row_moves import RowMoves
from freescale.pipeline.prioritized.urgent_chain import Left, UrgentChain
from freescale.pipeline.streams import Waitable, make_side, record_stream, wait_for
from freescale.pipeline.traffic import count_plain
from freescale.trace import stage

B = TypeVar("B")

LOOK_AHEAD = 2


class PrioritizedPipeline(Generic[B]):
    """Gives batches with their rows and takes their gradients home, with as little standing still as possible.

    Every rank must iterate over equally many batches (they may be empty) and call `update` for each.

    Args:
        batches: this rank's batches, in step order.
        embedding: the tables.
        rows_of: batch -> the rows it needs, by table; called in step order, from another thread.
        first_step: number of the first batch.
        prioritized: step -> whether its ids go ahead; the plain order where not. The same answer on every rank.
        look_past: step -> whether later batches may be looked at before this one's update. A map that changes as ids
            come in says no where its state is to be saved.
        check: prove the order of reads and updates as it goes (slow).
        chunk_mb: bulk travels in pieces of this size.
        gate: shut by whoever has urgent traffic of another kind under way.
        beside: `update` returns at once, and what the next batch waits for travels until it is taken.
        channels: connections, where not those of the embedding's group.

    Examples:
        >>> pipeline = PrioritizedPipeline(batches, embedding=tables, rows_of=lambda b: {"item": b.items})
        >>> for ready in pipeline:
        ...     loss_of(model(ready.vectors["item"]), ready.batch).backward()
        ...     optimizer.step()
        ...     pipeline.update(ready, lr=0.05)
    """

    def __init__(
        self,
        batches: Iterable[B],
        *,
        embedding: ShardedEmbedding,
        rows_of: Callable[[B], Mapping[str, Tensor]],
        first_step: int = 0,
        prioritized: Callable[[int], bool] = lambda step: True,
        look_past: Callable[[int], bool] = lambda step: True,
        check: bool = False,
        chunk_mb: float = 1.0,
        gate: Gate | None = None,
        beside: bool = False,
        channels: Channels | None = None,
    ) -> None:
        self._batches = iter(batches)
        self._loaded: B | _End | None = None
        self._embedding = embedding
        self._rows_of = rows_of
        self._prioritized, self._look_past = prioritized, look_past
        self._next_step = first_step
        self._last_updated = first_step - 1
        self._flights: deque[InFlightBatch[B]] = deque()
        self._under_way: dict[int, InFlightBatch[B]] = {}
        self._left: Left[B] | None = None
        self._parked: deque[tuple[InFlightBatch[B], Waitable[None]]] = deque()
        self.order: RowOrder = OrderCheck() if check else NoCheck()
        self.queue = TrafficQueue(chunk_bytes=int(chunk_mb * (1 << 20)), gate=gate)
        self._side = make_side(self.queue, embedding.device)
        self._moves = RowMoves(
            embedding,
            channels=channels
            or open_channels(
                embedding.group,
                device=embedding.device,
                kind=embedding.transport.name,
                nodes=None if embedding.stages is None else embedding.stages.groups,
            ),
            queue=self.queue,
            side=self._side,
            order=self.order,
        )
        self._chain: UrgentChain[B] | None = None
        if beside:
            self._chain = UrgentChain(self._moves, device=embedding.device, gate=self.queue.gate)
        embedding.before_reading = self.flush

    # What the training thread calls.

    def __iter__(self) -> Iterator[ReadyRows[B]]:
        """Batches with their rows; take the next one only after `update` of the last."""
        self._look_ahead()
        while self._flights:
            flight = self._flights[0]
            ready = self._ready(flight)
            # Bulk starts only now: it would have taken the link from the OL rows.
            self._start_bulk()
            self._look_ahead()
            yield ready
            if not flight.updated:
                raise FreeScaleError(
                    f"step {flight.step + 1} has not been updated",
                    next_step="call pipeline.update(ready, lr=...) for every batch before you take the next one",
                )
            self._flights.popleft()
            # A GPU computes what it was just given, so nobody waits for the loader.
            self._load()
            if not self._flights:
                self._look_ahead()

    def update(self, ready: ReadyRows[B], *, lr: float) -> None:
        """Send the gradients home: now those of rows the next batch needs, later all others."""
        flight = self._flights[0]
        if flight.step != ready.step or flight.updated:
            raise FreeScaleError(f"step {ready.step + 1} is not the batch that was taken last")
        self.queue.check()
        with flight.traffic.exposed():
            if not flight.prioritized:
                self._update_plainly(flight, ready, lr=lr)
            elif self._chain is not None and len(self._flights) > 1:
                self._chain.start(flight, self._flights[1], ready.lookups, lr=lr)
                self._update_replicated(flight, ready, lr=lr)
            else:
                self._scatter_gradients(flight, ready, lr=lr)
        flight.updated = True
        self._last_updated = flight.step

    def flush(self) -> None:
        """Bring every row of this rank up to date: wait until parked gradients are applied."""
        self.queue.check()
        self._finish_chain()
        self._start_bulk()
        while self._parked:
            with stage("flush parked gradients", step=self._parked[0][0].step + 1, kind="wait"):
                self._parked[0][1].wait()
            self._parked.popleft()

    def close(self) -> None:
        """Flush and end the communication thread; every rank must have taken the same batches."""
        self.flush()
        self.queue.close()
        if self._chain is not None:
            self._chain.close()
        self._embedding.before_reading = None

    def __enter__(self) -> PrioritizedPipeline[B]:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            # The other ranks will hear of it when this one ends; nothing is worth waiting for.
            self.queue.cancel(error)
            self.queue.close()
            if self._chain is not None:
                self._chain.close(error)

    def rows_in_flight(self, table: str) -> Tensor:
        """Unique local rows that batches under way use and that may still change, ascending; from any thread."""
        flights = list(self._under_way.values())
        rows = [flight.tables[table].request.owned.unique for flight in flights if table in flight.tables]
        return unique(torch.cat(rows))[0] if rows else torch.zeros(0, dtype=torch.int64)

    # What happens ahead of the model, and after it.

    def _look_ahead(self) -> None:
        """Begin batches up to LOOK_AHEAD after the current one: send their ids on their way."""
        while len(self._flights) <= LOOK_AHEAD and self._may_begin():
            batch = self._load()
            if isinstance(batch, _End):
                return
            self._loaded = None
            before = self._flights[-1] if self._flights else None
            flight = InFlightBatch(
                self._next_step, batch, self._prioritized(self._next_step), hidden=before is not None
            )
            self._flights.append(flight)
            self._under_way[flight.step] = flight
            self._next_step += 1
            if flight.prioritized:
                flight.ids = self.queue.submit(partial(self._send_ids, flight, before))
            self._start_bulk()

    def _load(self) -> B | _End:
        """The next batch, which waits for its turn."""
        if self._loaded is None:
            with stage("load", step=self._next_step + 1):
                self._loaded = next(self._batches, _END)
        return self._loaded

    def _may_begin(self) -> bool:
        """A batch whose ids do not go ahead begins when its time has come, and nothing overtakes it."""
        if not self._flights:
            return True
        before = self._flights[-1]
        return before.prioritized and self._prioritized(self._next_step) and self._look_past(before.step)

    def _send_ids(self, flight: InFlightBatch[B], before: InFlightBatch[B] | None) -> None:
        with stage("map ids", step=flight.step + 1):
            flight.asked = self._rows_of(flight.batch)
        self._moves.send_ids(flight, before)

    def _start_bulk(self) -> None:
        """NOL gradients of the last batch, then NOL rows of every batch whose last but one has been updated."""
        if self._left is not None:
            flight, grads, lr = self._left
            self._left = None
            self._parked.append((flight, self._side.submit(partial(self._send_parked, flight, grads, lr))))
            # Jobs are done in order, so all but the last two have long been.
            while len(self._parked) > LOOK_AHEAD:
                self._parked.popleft()[1].wait()
        for flight in self._flights:
            if (
                flight.ids is None
                or flight.early is not None
                or flight.step > self._last_updated + LOOK_AHEAD
            ):
                continue
            flight.early = self._side.submit(partial(self._fetch_early, flight))

    def _fetch_early(self, flight: InFlightBatch[B]) -> dict[str, Tensor]:
        assert flight.ids is not None
        flight.ids.wait()  # in a thread it is done: jobs run in order
        wait_for(flight.copied)
        return self._moves.fetch_early(flight)

    def _send_parked(self, flight: InFlightBatch[B], grads: dict[str, Tensor], lr: float) -> None:
        self._moves.send_parked(flight, grads, lr=lr)
        self._under_way.pop(flight.step)

    def _ready(self, flight: InFlightBatch[B]) -> ReadyRows[B]:
        """The last moment before the forward: late rows, and everything of a batch without look-ahead."""
        self.queue.check()
        with flight.traffic.exposed():
            self._finish_chain()
            lookups = self._look_up_late(flight) if flight.prioritized else self._look_up_plainly(flight)
        return ReadyRows(flight.step, flight.batch, lookups, flight.traffic)

    def _look_up_late(self, flight: InFlightBatch[B]) -> dict[str, Lookup]:
        assert flight.early is not None
        with stage("wait for NOL rows", step=flight.step + 1, kind="wait"):
            storage = flight.early.wait()
            flight.copied_by(flight)
        if not flight.late_rows_here:
            self._moves.fetch_late(flight, storage)
        # Replicated tables are updated by this thread alone, so nothing of them is under way.
        whole = {name: self._on_device(rows) for name, rows in flight.asked.items() if name not in storage}
        read = self._embedding.lookups(whole, updates_done=True)
        return {name: read.get(name) or self._lookup(flight, name, storage) for name in flight.asked}

    def _look_up_plainly(self, flight: InFlightBatch[B]) -> dict[str, Lookup]:
        flight.asked = self._rows_of(flight.batch)
        self.flush()
        with stage("look up rows", step=flight.step + 1):
            asked = {name: self._on_device(rows) for name, rows in flight.asked.items()}
            return self._embedding.lookups(asked, updates_done=True)

    def _on_device(self, rows: Tensor) -> Tensor:
        return rows.to(self._embedding.device)

    def _lookup(self, flight: InFlightBatch[B], name: str, storage: dict[str, Tensor]) -> Lookup:
        table = flight.tables[name]
        return Lookup(name, as_leaf(record_stream(storage[name])), table.inverse, table.request.unique)

    def _scatter_gradients(self, flight: InFlightBatch[B], ready: ReadyRows[B], *, lr: float) -> None:
        """OL gradients now; NOL gradients are left for the next job."""
        if len(self._flights) > 1:
            following = self._flights[1].ids
            assert following is not None
            with stage("wait for the split", step=flight.step + 1, kind="wait"):
                following.wait()
                flight.copied_by(self._flights[1])
        left = self._moves.send_urgent(flight, self._moves.pick_urgent(flight, ready.lookups), lr=lr)
        self._update_replicated(flight, ready, lr=lr)
        parked = Left(flight, left, lr)
        parked.count_rows(flight.traffic)
        self._park(parked)

    def _update_replicated(self, flight: InFlightBatch[B], ready: ReadyRows[B], *, lr: float) -> None:
        whole = [lookup for name, lookup in ready.lookups.items() if name not in flight.tables]
        self._embedding.update_all(whole, lr=lr, step=flight.step + 1)

    def _finish_chain(self) -> None:
        """OL gradients of the last batch are applied, and OL rows of the next are here."""
        left = None if self._chain is None else self._chain.finish()
        if left is not None:
            self._park(left)

    def _park(self, left: Left[B]) -> None:
        """Keep gradients that have time until bulk may start."""
        if left.grads:
            self._left = left
        else:
            self._under_way.pop(left.flight.step)

    def _update_plainly(self, flight: InFlightBatch[B], ready: ReadyRows[B], *, lr: float) -> None:
        """A batch without look-ahead: everything travels while the rank stands still."""
        with stage("send gradients home", step=flight.step + 1):
            self._embedding.update_all(list(ready.lookups.values()), lr=lr, step=flight.step + 1)
        self._under_way.pop(flight.step)
        count_plain(flight.traffic, ready.lookups.values(), self._embedding)


class _End:
    """Marks the end of the batches."""


_END = _End()
