"""Several tables in one exchange are what they are one at a time, to the bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from freescale.embedding import SGD, Adam, RowwiseAdagrad
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.request import exchange_all_ids, exchange_ids, find_overlaps
from freescale.embedding.sharding.sharded import ShardedEmbedding
from tests.ranks import run_on_ranks


def tables(dtype: torch.dtype) -> list[TableSpec]:
    """Of every width, optimizer and size; one is held by every rank, one has fewer rows than there are ranks."""
    return [
        TableSpec(name="item", num_rows=53, dim=6, optimizer=Adam(), dtype=dtype, init_std=1.0),
        TableSpec(name="genre", num_rows=7, dim=1, optimizer=SGD(), dtype=dtype, seed=3, lr_scale=0.5),
        TableSpec(name="hour", num_rows=24, dim=3, optimizer=SGD(), dtype=dtype, replicate=True),
        TableSpec(name="user", num_rows=11, dim=4, optimizer=RowwiseAdagrad(), dtype=torch.float64),
        TableSpec(name="tiny", num_rows=2, dim=5, optimizer=Adam(), dtype=torch.float32, row_group=2),
    ]


def loss_of(rows: torch.Tensor, rank: int) -> torch.Tensor:
    weight = torch.linspace(0.1, 1.7 + rank, rows.numel(), dtype=torch.float64).view_as(rows)
    return (weight * rows.double() ** 2).sum()


def _train(rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    group = dist.group.WORLD if dist.is_initialized() else None
    together, apart = (ShardedEmbedding(tables(dtype), group=group) for _ in range(2))
    rng = random.Random(rank)
    for step in range(1, 5):
        # Some ranks ask nothing of some tables.
        asked = {
            spec.name: torch.tensor(
                [rng.randrange(spec.num_rows) for _ in range(rng.choice((0, 1, 12)))], dtype=torch.int64
            )
            for spec in tables(dtype)
        }
        lookups = together.lookups(asked)
        assert list(lookups) == list(asked)
        for name, rows in asked.items():
            one = apart.lookup(name, rows)
            for field in ("rows", "unique", "inverse"):
                assert torch.equal(getattr(lookups[name], field), getattr(one, field)), (name, field)
            # In the third step nothing depends on the last table: its gradient is zero.
            if name != "tiny" or step != 3:
                loss_of(one.rows, rank).backward()
            apart.update(one, lr=0.1, step=step)
        for name, lookup in lookups.items():
            if name == "tiny" and step == 3:
                continue
            loss_of(lookup.rows, rank).backward()
        together.update_all(list(lookups.values()), lr=0.1, step=step)
    state = {name: _whole(value) for name, value in together.state_dict().items()}
    for name, value in apart.state_dict().items():
        assert torch.equal(state[name], _whole(value)), name
    return state


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_together_is_one_at_a_time(dtype: torch.dtype) -> None:
    _train(0, dtype)
    for num_ranks in (2, 3):
        results = run_on_ranks(_train, num_ranks, dtype)
        for name, value in results[0].items():
            assert all(torch.equal(value, other[name]) for other in results), name


def _requests(rank: int) -> None:
    embedding = ShardedEmbedding(tables(torch.float32), group=dist.group.WORLD)
    plans = [plan for plan in embedding.plans.values() if not plan.replicated]
    channel = embedding.transport
    rng = random.Random(10 + rank)

    def asked() -> list[torch.Tensor]:
        return [
            torch.tensor([rng.randrange(plan.spec.num_rows) for _ in range(rng.choice((0, 9)))]).long()
            for plan in plans
        ]

    batches = [asked(), asked()]
    together = [exchange_all_ids(plans, rows, channel=channel) for rows in batches]
    for rows, requests in zip(batches, together):
        for plan, one, request in zip(plans, rows, requests):
            alone = exchange_ids(plan, one, channel=channel)
            assert request.route == alone.route
            assert all(map(torch.equal, request.owned.tensors(), alone.owned.tensors()))
            assert torch.equal(request.unique[request.inverse], one)
    pairs = list(zip(*together))
    for pair, (before, after) in zip(pairs, find_overlaps(pairs, channel=channel)):
        ((first, second),) = find_overlaps([pair], channel=channel)
        for ours, alone in ((before, first), (after, second)):
            assert torch.equal(ours.asked, alone.asked)
            assert torch.equal(ours.owned, alone.owned)


def test_requests_and_overlaps_of_several_tables_are_those_of_each() -> None:
    run_on_ranks(_requests, 3)


def test_several_lookups_of_one_table_are_one_update() -> None:
    specs = tables(torch.float64)[:2]
    once, twice = (ShardedEmbedding(specs) for _ in range(2))
    for step in (1, 2):
        ids = torch.tensor([1, 2, 2, 3, 2, 5])
        whole = once.lookups({"item": ids, "genre": ids})
        parts = [twice.lookups({"item": part, "genre": part}) for part in (ids[:3], ids[3:])]
        for name in whole:
            loss = whole[name].vectors().square().sum()
            loss.backward()
            torch.cat([part[name].vectors() for part in parts]).square().sum().backward()
        once.update_all(list(whole.values()), lr=0.1, step=step)
        twice.update_all([lookup for part in parts for lookup in part.values()], lr=0.1, step=step)
    for name, value in once.state_dict().items():
        torch.testing.assert_close(twice.state_dict()[name], value, rtol=0, atol=1e-12)
