"""Experts spread over ranks give what one rank gives, and a token crosses once to each rank that needs it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm import exchange_counts
from freescale.comm.traffic.channels import open_channel
from freescale.comm.traffic.expert_exchange import ExpertExchange
from freescale.comm.transport import AloneTransport, Pending
from freescale.kernels.moe.reference import expert_mlp
from tests.ranks import run_on_ranks

DIM, HIDDEN, TOP_K = 6, 4, 3


class CountingTransport:
    """Remembers how many rows were sent to other ranks, by width of the tensor."""

    def __init__(self, transport) -> None:
        self._transport = transport
        self.num_ranks, self.rank = transport.num_ranks, transport.rank
        self.sent: list[tuple[int, int]] = []

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Pending:
        self.sent.append((tensor.shape[1], sum(send)))
        return self._transport.start(tensor, send=send, receive=receive)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        return exchange_counts(self._transport, counts)


def make_weights(num_experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w_in = torch.randn(num_experts, 2 * HIDDEN, DIM, dtype=torch.float64, generator=generator)
    return w_in, torch.randn(num_experts, DIM, HIDDEN, dtype=torch.float64, generator=generator)


def tokens_of(rank: int, num_experts: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weights, experts and a probe of a rank; in the first batch rank 1 has no tokens, in the second nobody."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    drawn = int(torch.randint(40, (1,), generator=generator))
    count = {0: [13, 0, 5, 30][rank], 1: 0}.get(seed, drawn)
    x, probe = torch.randn(2, count, DIM, dtype=torch.float64, generator=generator)
    weights = torch.rand(count, TOP_K, dtype=torch.float64, generator=generator)
    experts = torch.rand(count, num_experts, generator=generator).topk(TOP_K, dim=1).indices
    return x.requires_grad_(), weights.requires_grad_(), experts, probe


def against_one_rank(rank: int, num_ranks: int, num_experts: int) -> None:
    transport = CountingTransport(open_channel(dist.group.WORLD))
    exchange = ExpertExchange(transport)
    for seed in range(6):
        transport.sent.clear()
        check(rank, num_ranks, num_experts, exchange, seed)
        experts = tokens_of(rank, num_experts, seed)[2]
        size = -(-num_experts // num_ranks)
        once = sum(len({expert // size for expert in row}) for row in experts.tolist())
        assert transport.sent[0] == (DIM, once), (
            "a token crosses once to each rank that holds any of its experts"
        )
        assert transport.sent[1] == (2 * TOP_K, once)


def check(rank: int, num_ranks: int, num_experts: int, exchange: ExpertExchange, seed: int) -> None:
    """Results and all gradients of one batch."""
    first, count = exchange.block(num_experts)
    w_in, w_out = (w[first : first + count].clone().requires_grad_() for w in make_weights(num_experts))

    def run(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return expert_mlp(x, weights, experts, w_in, w_out) + 0 * (x.sum() + weights.sum())

    x, weights, experts, probe = tokens_of(rank, num_experts, seed)
    y = exchange(x, weights, experts, num_experts=num_experts, run=run)
    (y * probe).sum().backward()

    all_in, all_out = (w.requires_grad_() for w in make_weights(num_experts))
    for each in range(num_ranks):
        other = tokens_of(each, num_experts, seed)
        truth = expert_mlp(*other[:3], all_in, all_out)
        (truth * other[3]).sum().backward()
        if each == rank:
            torch.testing.assert_close(y, truth)
            torch.testing.assert_close(x.grad, other[0].grad)
            torch.testing.assert_close(weights.grad, other[1].grad)
    if count:
        torch.testing.assert_close(w_in.grad, all_in.grad[first : first + count])
        torch.testing.assert_close(w_out.grad, all_out.grad[first : first + count])


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(2, 6), (3, 4), (4, 7)])
def test_spread_experts_give_what_one_rank_gives(num_ranks: int, num_experts: int) -> None:
    run_on_ranks(against_one_rank, num_ranks, num_ranks, num_experts)


def test_blocks_cover_all_experts_in_rank_order() -> None:
    class Someone(AloneTransport):
        def __init__(self, rank: int, num_ranks: int) -> None:
            self.rank, self.num_ranks = rank, num_ranks

    for num_ranks in range(1, 7):
        for num_experts in range(1, 10):
            blocks = [ExpertExchange(Someone(r, num_ranks)).block(num_experts) for r in range(num_ranks)]
            held = [e for first, count in blocks for e in range(first, first + count)]
            assert held == list(range(num_experts))


def test_one_rank_is_not_split() -> None:
    assert not ExpertExchange(AloneTransport()).is_split
