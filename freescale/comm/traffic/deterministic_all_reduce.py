"""Sums over the ranks, made of exchanges: the same bits on every rank and in every run, over any transport."""

from __future__ import annotations

from torch import Tensor

from freescale.comm import Pending, Transport
from freescale.kernels.runtime import sum_parts

_SMALL_BYTES = 64 << 10


class PendingAllReduce:
    """Values being added up over the ranks: sent whole when small or to one other rank, else in one part a rank.

    Args:
        transport: how they travel; nobody else may start transfers on it in another order.
        values: of this rank, of one shape and type on every rank.
    """

    def __init__(self, transport: Transport, values: Tensor) -> None:
        self._transport, self._shape = transport, values.shape
        num_ranks = transport.num_ranks
        flat = values.detach().contiguous().view(-1)
        self._whole = num_ranks <= 2 or flat.nbytes <= _SMALL_BYTES
        if self._whole:
            self._sizes = [len(flat)] * num_ranks
            self._first = transport.start(flat.repeat(num_ranks), send=self._sizes, receive=self._sizes)
        else:
            self._sizes = [len(part) for part in flat.tensor_split(num_ranks)]
            mine = [self._sizes[transport.rank]] * num_ranks
            self._first = transport.start(flat, send=self._sizes, receive=mine)

    def wait(self) -> Tensor:
        """The sum, added in rank order."""
        num_ranks = self._transport.num_ranks
        parts = self._first.wait().view(num_ranks, -1)
        if self._whole:
            return sum_parts(parts).view(self._shape)
        mine = [parts.shape[1]] * num_ranks
        total = sum_parts(parts, copies=num_ranks)
        return self._transport.start(total, send=mine, receive=self._sizes).wait().view(self._shape)


class _OwnSum:
    """That of a rank alone: nothing travels, which would take a dozen calls of torch in every step."""

    def __init__(self, values: Tensor) -> None:
        self._sum = values.detach().clone()

    def wait(self) -> Tensor:
        """The values."""
        return self._sum


def start_all_reduce(transport: Transport, values: Tensor) -> Pending:
    """Begin to add values up over the ranks; returns at once. Ranks wait for their sums in the order of the starts."""
    return _OwnSum(values) if transport.num_ranks == 1 else PendingAllReduce(transport, values)
