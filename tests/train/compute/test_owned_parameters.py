"""Parameters that one rank holds: the norm sees those of all ranks, and every rank scales by the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from freescale.comm.traffic.channels import open_channel
from freescale.comm.traffic.expert_exchange import ExpertExchange
from freescale.model.parts.moe import MoE
from freescale.train.compute.owned_parameters import OwnedParameters
from freescale.train.log.expert_load import lengths_of_split_experts
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks


def make_model(dispatch: ExpertExchange | None = None) -> nn.Module:
    torch.manual_seed(0)
    moe = MoE(dim=4, hidden=3, num_experts=5, top_k=2, dispatch=dispatch)
    return nn.Sequential(moe, nn.Linear(4, 2)).double()


def fill(model: nn.Module, first: int, count: int) -> None:
    """The same gradients however the experts are spread."""
    for n, (name, param) in enumerate(model.named_parameters()):
        shape = (5, *param.shape[1:]) if name in ("0.w_in", "0.w_out") else param.shape
        whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        param.grad = whole[first : first + count] if shape != param.shape else whole


def clip(rank: int, num_ranks: int) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    exchange = ExpertExchange(open_channel(dist.group.WORLD))
    model = make_model(exchange)
    first, count = exchange.block(5)
    fill(model, first, count)
    owned = OwnedParameters(model, these_ranks(), lengths=lengths_of_split_experts(model))
    assert owned.names == {"0.w_in", "0.w_out"}
    assert owned.num_values("0.w_in", model[0].w_in) == 5 * 6 * 4
    assert tuple(owned.whole("0.w_in", model[0].w_in).shape) == (5, 6, 4)
    norm = float(owned.clip(0.5))
    return norm, {name: param.grad.clone() for name, param in model.named_parameters()}, [first, count]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_clipping_over_ranks_is_clipping_on_one(num_ranks: int) -> None:
    alone = make_model()
    fill(alone, 0, 5)
    owned = OwnedParameters(alone, these_ranks(), lengths=lengths_of_split_experts(alone))
    assert owned.names == set()
    norm = float(owned.clip(0.5))
    results = run_on_ranks(clip, num_ranks, num_ranks)
    for got, grads, (first, count) in results:
        assert got == pytest.approx(norm, rel=1e-12)
        assert got == results[0][0], "ranks must scale by the same bits"
        for name, param in alone.named_parameters():
            mine = param.grad[first : first + count] if name in ("0.w_in", "0.w_out") else param.grad
            torch.testing.assert_close(grads[name], mine, rtol=1e-12, atol=0)
