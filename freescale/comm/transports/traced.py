"""A transport whose exchanges are recorded: when this rank was ready for each, and how long it stood waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from freescale import trace
from freescale.comm import Pending, Transport, exchange_counts, sends_unsized


class TracedTransport:
    """Passes everything on to another transport and records it under the name of the stage it happens in.

    Args:
        transport: does the work.
    """

    def __init__(self, transport: Transport) -> None:
        self.inner = transport
        self.name, self.num_ranks, self.rank = transport.name, transport.num_ranks, transport.rank
        self.engine, self.sm_free, self.reason = transport.engine, transport.sm_free, transport.reason
        if sends_unsized(transport):
            self.exchange_unsized = self._exchange_unsized

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Begin to send; this is the arrival at the exchange."""
        arrival = trace.arrive(on_device=tensor.is_cuda)
        pending = self.inner.start(tensor, send=send, receive=receive)
        if arrival is None:
            return pending
        if not tensor.is_cuda:
            # On a CPU the caller itself may copy and send here; on a GPU it only queues.
            trace.waited(arrival, arrival.mark, over=False)
        return _TracedPending(pending, arrival, on_device=tensor.is_cuda)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Counts to and from every rank, waited for."""
        arrival = trace.arrive(on_device=counts.is_cuda)
        received = exchange_counts(self.inner, counts)
        if arrival is not None:
            trace.waited(arrival, arrival.mark, on_device=counts.is_cuda)
        return received

    def _exchange_unsized(
        self, values: Sequence[Tensor], *, send: Sequence[Sequence[int]]
    ) -> tuple[list[Tensor], list[list[int]]]:
        """Rows whose number the others do not know yet, waited for."""
        assert sends_unsized(self.inner)
        arrival = trace.arrive(on_device=values[0].is_cuda)
        received = self.inner.exchange_unsized(values, send=send)
        if arrival is not None:
            trace.waited(arrival, arrival.mark, on_device=values[0].is_cuda)
        return received

    def __getattr__(self, name: str) -> Any:
        """Whatever else a transport offers."""
        return getattr(self.inner, name)


class _TracedPending:
    def __init__(self, pending: Pending, arrival: trace.Arrival, *, on_device: bool) -> None:
        self._pending, self._arrival, self._on_device = pending, arrival, on_device

    def wait(self) -> Tensor:
        start = trace.mark(on_device=self._on_device)
        received = self._pending.wait()
        trace.waited(self._arrival, start, on_device=self._on_device)
        return received
