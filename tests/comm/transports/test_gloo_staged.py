"""Rows of a device that the group cannot read: staged, summed and gathered all the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from freescale.comm.traffic.channels import open_channels
from freescale.comm.traffic.deterministic_all_reduce import start_all_reduce
from freescale.comm.transport import supports_device
from freescale.comm.transports.gloo_staged import GlooStagedTransport
from freescale.comm.transports.kinds import collective
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.registry import make_transport
from freescale.comm.world import ranks
from freescale.comm.world.ranks import Ranks
from tests.comm.test_transport import exchange_cases
from tests.ranks import run_on_ranks


def pretend_not_to_support_the_device() -> None:
    """As if every tensor lived on a GPU; called in a forked rank."""
    for module in (collective, ranks):
        module.supports_device = lambda group, device: False


def staged_exchanges(rank: int, num_ranks: int) -> None:
    pretend_not_to_support_the_device()
    chosen = make_transport(dist.group.WORLD, kind="collective")
    assert isinstance(chosen, GlooStagedTransport)
    assert (chosen.name, chosen.sm_free) == ("collective", True)
    assert "gloo" in chosen.engine
    assert "share one GPU" in chosen.reason
    exchange_cases(chosen, rank, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_staged_rows_arrive_by_source_rank_whatever_the_splits(num_ranks):
    run_on_ranks(staged_exchanges, num_ranks, num_ranks)


def staged_rows_are_copies(rank: int) -> None:
    """The sender may overwrite its rows as soon as `start` has returned."""
    pretend_not_to_support_the_device()
    chosen = make_transport(dist.group.WORLD, kind="collective")
    mine = torch.full((4,), float(rank))
    pending = chosen.start(mine, send=[2, 2], receive=[2, 2])
    mine.fill_(-1)
    assert pending.wait().tolist() == [0, 0, 1, 1]


def test_what_was_sent_may_be_overwritten_at_once():
    run_on_ranks(staged_rows_are_copies, 2)


def sums_and_gathers(rank: int, num_ranks: int) -> None:
    for pretend in (False, True):
        if pretend:
            pretend_not_to_support_the_device()
        group = Ranks(rank=rank, num_ranks=num_ranks, device=torch.device("cpu"), group=dist.group.WORLD)
        values = torch.arange(3) + 10 * rank
        gathered = group.gather(values)
        assert [part.tolist() for part in gathered] == [
            [0 + 10 * r, 1 + 10 * r, 2 + 10 * r] for r in range(num_ranks)
        ]
        total = group.sum(values)
        assert total is values
        assert total.tolist() == torch.stack(gathered).sum(0).tolist()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_sum_and_gather_by_way_of_the_cpu(num_ranks):
    run_on_ranks(sums_and_gathers, num_ranks, num_ranks)


def sum_in_parts(rank: int, num_ranks: int, size: int) -> tuple[list[float], bool]:
    pretend_not_to_support_the_device()
    chosen = make_transport(dist.group.WORLD, kind="collective")
    parts = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(num_ranks)]
    first, second = start_all_reduce(chosen, parts[rank]), start_all_reduce(chosen, parts[rank].view(-1, 1))
    wanted = parts[0].clone()
    for part in parts[1:]:
        wanted += part
    assert torch.equal(first.wait(), wanted)
    assert torch.equal(second.wait(), wanted.view(-1, 1))


@pytest.mark.parametrize(("num_ranks", "size"), [(2, 5), (3, 7), (3, 40_001)])
def test_sums_over_a_transport_are_in_rank_order_to_the_bit(num_ranks, size):
    run_on_ranks(sum_in_parts, num_ranks, num_ranks, size)


def channels_of_a_shared_gpu(rank: int) -> None:
    pretend_not_to_support_the_device()
    opened = open_channels(dist.group.WORLD, kind="collective")
    assert isinstance(opened.express, GlooStagedTransport)
    assert opened.express._group is not opened.bulk._group
    assert opened.express._group is not dist.group.WORLD
    ones = [1, 1]
    first = opened.express.start(torch.tensor([rank, rank]), send=ones, receive=ones)
    second = opened.bulk.start(torch.tensor([10 + rank, 10 + rank]), send=ones, receive=ones)
    assert (second.wait().tolist(), first.wait().tolist()) == ([10, 11], [0, 1])


def test_channels_of_a_shared_gpu_have_groups_of_their_own():
    run_on_ranks(channels_of_a_shared_gpu, 2)


def what_gloo_supports(rank: int) -> tuple[bool, bool]:
    group = dist.group.WORLD
    assert isinstance(make_transport(group, kind="collective"), CollectiveTransport)
    return supports_device(group, torch.device("cpu")), supports_device(group, torch.device("cuda", 0))


def test_gloo_supports_cpu_tensors_only():
    assert run_on_ranks(what_gloo_supports, 1) == [(True, False)]
