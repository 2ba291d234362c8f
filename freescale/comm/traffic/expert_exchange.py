"""Experts spread over the ranks: tokens travel to the ranks of their experts, sums of results travel back.

    rank 0   tokens ──distinct per rank──> rows ┐              ┌─> sum over ranks, in rank order
                                                ├─ all-to-all ─┤
    rank 1   experts held here: y = sum of weight * expert(x) ─┘     (gradients go the same ways, backwards)

A token crosses once to each rank that holds any of its experts, however many of them it holds, and one row comes back:
the weighted sum over those experts. Weights and expert numbers go along, so nothing else has to be asked for. An
expert sees the tokens of all ranks, so its gradient is complete where it lives; nothing is added up over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.comm import Transport, agree_on_counts
from freescale.comm.traffic.priority import Deadline, Gate
from freescale.kernels.rows import sum_rows, take
from freescale.trace import stage

StandsStill = Callable[[], AbstractContextManager[None]]


class ExpertExchange:
    """Dispatch over the ranks of a transport. Every rank must call it equally often, with tokens or without.

    Args:
        transport: a connection that nothing else uses.
        gate: shut while tokens travel: the rank stands still for them, and bulk has time.
        stands_still: entered while the rank waits for an exchange, to keep that time out of its compute.
    """

    def __init__(
        self, transport: Transport, *, gate: Gate | None = None, stands_still: StandsStill = nullcontext
    ) -> None:
        self._transport = transport
        self._gate = gate or Gate()
        self.stands_still = stands_still

    @property
    def is_split(self) -> bool:
        """Whether this rank holds a part of the experts only."""
        return self._transport.num_ranks > 1

    def block(self, num_experts: int) -> tuple[int, int]:
        """The first expert of this rank, and how many; the last ranks may have fewer or none."""
        size = self._block_size(num_experts)
        first = min(self._transport.rank * size, num_experts)
        return first, min(size, num_experts - first)

    def __call__(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        *,
        num_experts: int,
        run: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Sum over k of weight * expert(x), wherever the experts live."""
        size = self._block_size(num_experts)
        trip = self._plan(experts_TK.long(), size)
        here = trip.owner.index_select(0, trip.token) == trip.rank[:, None]
        weights = take(weights_TK, trip.token)
        numbers = (experts_TK.long().index_select(0, trip.token) - trip.rank[:, None] * size).where(here, -1)
        x, weights, numbers = _ToExperts.apply(take(x_TD, trip.token), weights, numbers, self, trip)  # type: ignore[no-untyped-call]
        back = _FromExperts.apply(_run_pairs(x, weights, numbers, run), self, trip)  # type: ignore[no-untyped-call]
        return sum_rows(back, trip.token, len(x_TD))

    def _block_size(self, num_experts: int) -> int:
        return -(-num_experts // self._transport.num_ranks)

    def _plan(self, experts_TK: Tensor, size: int) -> Trip:
        """Which token goes to which rank, once: sorted by rank, then by token."""
        num_ranks = self._transport.num_ranks
        owner = experts_TK // size
        goes = torch.zeros(len(experts_TK), num_ranks, dtype=torch.bool, device=experts_TK.device)
        goes.scatter_(1, owner, True)
        rank, token = goes.t().nonzero(as_tuple=True)
        with stage("exchange expert counts"), self.stands_still():
            send, receive = agree_on_counts(self._transport, goes.sum(0))
        return Trip(token, rank, owner, send, receive)

    def move(self, name: str, *tensors: Tensor, send: list[int], receive: list[int]) -> list[Tensor]:
        """Row blocks of several tensors to the ranks, started together."""
        with self._gate.urgent(Deadline.DENSE_GRADIENTS), stage(name), self.stands_still():
            pending = [self._transport.start(tensor, send=send, receive=receive) for tensor in tensors]
            return [one.wait() for one in pending]


class Trip(NamedTuple):
    """The rows that travel.

    Args:
        token: [S] the token of each row sent.
        rank: [S] where it goes.
        owner: [T, K] the rank of each expert chosen.
        send: rows to every rank.
        receive: rows from every rank.
    """

    token: Tensor
    rank: Tensor
    owner: Tensor
    send: list[int]
    receive: list[int]


def _run_pairs(
    x: Tensor, weights: Tensor, numbers: Tensor, run: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """The experts held here for the rows that came: a row for each (token, expert), as tokens have unlike numbers."""
    row, choice = (numbers >= 0).nonzero(as_tuple=True)
    y = run(take(x, row), weights[row, choice, None], numbers[row, choice, None])
    return sum_rows(y, row, len(x))


class _ToExperts(torch.autograd.Function):
    """Tokens, weights and expert numbers to the experts; gradients of tokens and weights back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, numbers: Tensor, exchange: ExpertExchange, trip: Trip
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.trip = exchange, trip
        # Numbers travel beside the weights: one transfer less, and exact up to 2^24 experts.
        facts = torch.cat([weights, numbers.to(weights.dtype)], dim=1)
        x, facts = exchange.move("send tokens to experts", x, facts, send=trip.send, receive=trip.receive)
        weights, numbers = (part.contiguous() for part in facts.chunk(2, dim=1))
        numbers = numbers.long()
        ctx.mark_non_differentiable(numbers)
        return x, weights, numbers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = {"send": ctx.trip.receive, "receive": ctx.trip.send}
        dx, dweights = ctx.exchange.move("send token gradients home", grads[0], grads[1], **back)
        return dx, dweights, None, None, None


class _FromExperts(torch.autograd.Function):
    """Results to the ranks their tokens came from; their gradients to the experts."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: ExpertExchange, trip: Trip) -> Tensor:
        ctx.exchange, ctx.trip = exchange, trip
        (back,) = exchange.move("send results home", y, send=trip.receive, receive=trip.send)
        return back

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        trip = ctx.trip
        (dy,) = ctx.exchange.move("send gradients to experts", grads[0], send=trip.send, receive=trip.receive)
        return dy, None, None
