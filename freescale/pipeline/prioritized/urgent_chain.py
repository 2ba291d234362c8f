"""UrgentChain: what the next batch waits for, beside a training thread that still has weight gradients to compute.

    training thread   ┃ backward n, inputs only ┃ weight gradients n, sums, update of weights ┃ forward n+1
                                                │                                             ^
    this chain                                  └ OL grads n ─ apply ─ NOL rows n+1 ─ OL rows n+1

On a CPU rank it is a thread, on a GPU a stream of high priority. Its transfers use the express connection, in the order
in which the training thread would start them; while it runs, that thread starts none there.
"""

from __future__ import annotations

from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from freescale.comm.traffic import Gate, TrafficQueue
from freescale.embedding import Lookup
from freescale.pipeline.prioritized.in_flight import InFlightBatch
from freescale.pipeline.prioritized.row_moves import RowMoves, UrgentGradients
from freescale.pipeline.streams import Waitable, make_side
from freescale.pipeline.traffic import Traffic
from freescale.trace import stage

B = TypeVar("B")


class Left(NamedTuple, Generic[B]):
    """Gradients of a batch that the next one does not depend on; they are still to be sent."""

    flight: InFlightBatch[B]
    grads: dict[str, Tensor]
    lr: float

    def count_rows(self, traffic: Traffic) -> None:
        """Count the rows whose gradients they are."""
        for name in self.grads:
            parked = self.flight.tables[name].parked
            traffic.of(name).parked_rows += 0 if parked is None else len(parked.index)


class UrgentChain(Generic[B]):
    """Sends overlapped gradients home, applies them and fetches overlapped rows, while something else goes on.

    Args:
        moves: moves rows and gradients.
        device: where the tables are.
        gate: shut while urgent traffic is under way.
    """

    def __init__(self, moves: RowMoves, *, device: torch.device, gate: Gate) -> None:
        self._moves = moves
        self._queue = TrafficQueue(gate=gate, name="urgent rows")
        self._side = make_side(self._queue, device, urgent=True)
        self._under_way: (
            tuple[Waitable[dict[str, Tensor]], InFlightBatch[B], InFlightBatch[B], float] | None
        ) = None
        self._moved = Traffic()

    def start(
        self, flight: InFlightBatch[B], following: InFlightBatch[B], lookups: dict[str, Lookup], *, lr: float
    ) -> None:
        """Begin with the gradients of `flight`, and end with the rows of `following`."""
        assert self._under_way is None
        self._queue.check()
        self._moved = Traffic()
        pick = partial(self._pick, flight, following, lookups)
        # On the stream that computes, ahead of weight gradients: a product of theirs fills a GPU, and a kernel of
        # another stream, however urgent, begins when that is over.
        picked = pick() if self._side.at_once else None
        job = self._side.submit(lambda: self._run(flight, following, picked or pick(), lr))
        self._under_way = (job, flight, following, lr)

    def finish(self) -> Left[B] | None:
        """Wait until the chain is through, if one is under way; the gradients it has left."""
        if self._under_way is None:
            return None
        (job, flight, following, lr), self._under_way = self._under_way, None
        with stage("wait for OL rows", step=following.step + 1, kind="wait"):
            left = job.wait()
        # The account of `flight` is closed: what its gradients have moved is counted with the batch that needs them.
        following.traffic.add(self._moved)
        following.late_rows_here = True
        parked = Left(flight, left, lr)
        parked.count_rows(following.traffic)
        return parked

    def check(self) -> None:
        """Raise the error that broke the chain, if one did."""
        self._queue.check()

    def close(self, error: BaseException | None = None) -> None:
        """End its thread; after an error nothing is waited for."""
        if error is not None:
            self._queue.cancel(error)
        self._queue.close()

    def _pick(
        self, flight: InFlightBatch[B], following: InFlightBatch[B], lookups: dict[str, Lookup]
    ) -> UrgentGradients:
        assert following.ids is not None
        with stage("wait for the split", step=flight.step + 1, kind="wait"):
            following.ids.wait()
            flight.copied_by(following)
        return self._moves.pick_urgent(flight, lookups)

    def _run(
        self,
        flight: InFlightBatch[B],
        following: InFlightBatch[B],
        picked: UrgentGradients,
        lr: float,
    ) -> dict[str, Tensor]:
        assert following.early is not None
        left = self._moves.send_urgent(flight, picked, lr=lr, beside=self._moved)
        with stage("wait for NOL rows", step=following.step + 1, kind="wait"):
            storage = following.early.wait()
            following.copied_by(following)
        self._moves.fetch_late(following, storage, beside=self._moved)
        return left
