"""ShardedCompute: each distinct item is computed once by one rank, and gradients come home added up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from freescale.comm.transport import AloneTransport
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.embedding.sharded_compute import ShardedCompute
from tests.effort import examples
from tests.ranks import run_on_ranks

NUM_ITEMS, DIM = 23, 3


def vector_of(items: torch.Tensor) -> torch.Tensor:
    """Something that tells items apart."""
    return torch.stack([items.double(), items.double() ** 2, -items.double()], dim=1)


def asked_by(rank: int) -> torch.Tensor:
    """Items with repeats; the last rank asks for none."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(0, NUM_ITEMS, (0 if rank == 3 else 15,), generator=draw)


@examples(10, thorough=200)
@given(st.integers(1, 40), st.data())
def test_alone_everything_is_computed_here_once(num_items: int, data: st.DataObject) -> None:
    items = torch.tensor(data.draw(st.lists(st.integers(0, num_items - 1), max_size=30)), dtype=torch.int64)
    work = ShardedCompute(num_items)
    assert sorted(work.own.tolist()) == list(range(num_items))
    request = work.request(items)
    wanted = work.wanted(request)
    assert sorted(wanted.tolist()) == sorted(set(items.tolist()))
    delivered = work.deliver(vector_of(wanted), request)
    assert torch.equal(delivered[request.inverse], vector_of(items))
    grad = torch.randn(len(delivered), DIM, dtype=torch.float64)
    home = work.collect(grad, request)
    by_item = dict(zip(wanted.tolist(), home.tolist()))
    for item, slot in zip(items.tolist(), request.inverse.tolist()):
        assert by_item[item] == grad[slot].tolist()


def share_out(rank: int) -> Any:
    transport = CollectiveTransport(dist.group.WORLD)
    work = ShardedCompute(NUM_ITEMS, numbers=transport, vectors=transport)
    items = asked_by(rank)
    request = work.request(items)
    wanted = work.wanted(request)
    delivered = work.deliver(vector_of(wanted), request)
    assert torch.equal(delivered[request.inverse], vector_of(items))
    # Each rank's gradient of an item is (rank + 1) * its vector.
    home = work.collect((rank + 1) * delivered, request)
    return work.own.tolist(), wanted.tolist(), home.tolist()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_share_out_the_distinct_items_of_all_of_them(num_ranks: int) -> None:
    results = run_on_ranks(share_out, num_ranks)
    assert sorted(item for own, _, _ in results for item in own) == list(range(NUM_ITEMS))
    computed = [item for _, wanted, _ in results for item in wanted]
    everybody = [set(asked_by(rank).tolist()) for rank in range(num_ranks)]
    assert sorted(computed) == sorted(set().union(*everybody))
    for own, wanted, home in results:
        assert set(wanted) <= set(own)
        for item, grad in zip(wanted, home, strict=True):
            factor = sum(rank + 1 for rank in range(num_ranks) if item in everybody[rank])
            assert grad == (factor * vector_of(torch.tensor([item]))[0]).tolist()


def test_neighbouring_items_go_to_different_ranks() -> None:
    class Two(AloneTransport):
        num_ranks = 2

    first_half = ShardedCompute(1000, numbers=Two()).own
    assert len(first_half) == 500
    assert 45 <= int((first_half < 100).sum()) <= 55
