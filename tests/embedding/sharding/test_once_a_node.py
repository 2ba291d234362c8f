"""Rows once a node: the rows and sums of one stage, in an order that is fixed, and fewer bytes between nodes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from freescale.comm.traffic import (
    NodeStages,
    open_channels,
    open_node_groups,
    open_node_stages,
    why_no_node_stages,
)
from freescale.embedding import SGD, Adam, RowwiseAdagrad
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.errors import ConfigError
from tests.effort import slow
from tests.pipeline.two_paths import random_batches, state_bits, train_plainly, train_prioritized
from tests.ranks import run_on_ranks

# Nodes in a row, in turn, and so that the order of nodes differs from place to place.
LAYOUTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)]


def stages_on(nodes: tuple[int, ...], rank: int) -> NodeStages:
    os.environ.update(LOCAL_WORLD_SIZE="2", GROUP_RANK=str(nodes[rank]))
    assert dist.group.WORLD is not None
    return open_node_stages(open_node_groups(dist.group.WORLD))


def specs(dtype: torch.dtype) -> list[TableSpec]:
    """Several widths and optimizers; blocks that are not full, and fewer rows than ranks."""
    return [
        TableSpec(name="item", num_rows=53, dim=6, optimizer=Adam(), dtype=dtype, init_std=1.0),
        TableSpec(name="user", num_rows=10, dim=3, optimizer=RowwiseAdagrad(), dtype=dtype, init_std=1.0),
        TableSpec(name="tiny", num_rows=3, dim=2, optimizer=SGD(), dtype=dtype, init_std=1.0),
        TableSpec(name="hour", num_rows=24, dim=3, optimizer=SGD(), dtype=dtype, replicate=True),
    ]


def same_as_one_stage(rank: int, stages: NodeStages) -> None:
    tables = specs(torch.float64)
    once, often = (ShardedEmbedding(tables, stages=each) for each in (stages, None))
    for step, batch in enumerate(random_batches(3, tables, 5, rank, 4)):
        ours, theirs = once.lookups(batch), often.lookups(batch)
        for name, asked in batch.items():
            got, expected = ours[name], theirs[name]
            assert torch.equal(got.unique, expected.unique)
            assert torch.equal(got.unique[got.inverse], asked)
            torch.testing.assert_close(got.rows, expected.rows, rtol=1e-11, atol=1e-11)
            if step == 0:
                assert torch.equal(got.rows, expected.rows)
            # A gradient that differs from rank to rank and row to row, and not between the two.
            grad = torch.sin(got.unique[:, None] * (1 + rank) + torch.arange(got.rows.shape[1])).double()
            got.rows.grad, expected.rows.grad = grad.clone(), grad.clone()
        once.update_all(list(ours.values()), lr=0.1, step=step + 1)
        often.update_all(list(theirs.values()), lr=0.1, step=step + 1)
    for name, table in once.tables.items():
        torch.testing.assert_close(table.weight, often.tables[name].weight, rtol=1e-11, atol=1e-11)


def same_bits(rank: int, stages: NodeStages, options: dict[str, Any]) -> float:
    """Rows that neighbouring batches share."""
    tables = specs(torch.float32)
    batches = random_batches(5, tables, 9, rank, 4)
    plain, ours = (ShardedEmbedding(tables, stages=stages) for _ in range(2))
    expected = train_plainly(plain, batches)
    channels = open_channels(dist.group.WORLD, nodes=stages.groups)
    assert channels.inside is not None
    assert (channels.express.name, channels.inside.express.name) == ("collective", "local")
    losses, traffic = train_prioritized(ours, batches, channels=channels, **options)
    assert losses == expected
    assert state_bits(ours) == state_bits(plain)
    return sum(step.shared_rows for step in traffic)


def both(rank: int, nodes: tuple[int, ...], options: dict[str, Any]) -> float:
    stages = stages_on(nodes, rank)
    same_as_one_stage(rank, stages)
    return same_bits(rank, stages, options)


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        (LAYOUTS[0], {"check": True}),
        (LAYOUTS[2], {"beside": True, "chunk_mb": 1e-4}),
        slow(LAYOUTS[1], {"beside": True, "check": True}),
    ],
)
def test_rows_and_updates_are_those_of_one_stage_and_prioritized_has_the_bits_of_plain(
    nodes: tuple[int, ...], options: dict[str, Any]
) -> None:
    assert sum(run_on_ranks(both, 4, nodes, options)) > 60


def one_row_and_many(rank: int) -> tuple[float, int, int]:
    """What is left of a row's gradients; rows that this rank gets from the other node, once a node and once a rank."""
    stages = stages_on(LAYOUTS[0], rank)
    spec = TableSpec(name="item", num_rows=80, dim=1, optimizer=SGD(), init_std=0.0)
    once, often = (ShardedEmbedding([spec], stages=each) for each in (stages, None))
    lookup = once.lookup("item", torch.tensor([50]))
    # In float32 1 + 2^25 is 2^25: what is left says what was added to what first.
    lookup.rows.grad = torch.tensor([[(1.0, 1.0, 2.0**25, -(2.0**25))[rank]]])
    once.update(lookup, lr=-1.0, step=1)
    asked = torch.arange(0, 80, 2)
    staged, plain = (each.lookup("item", asked) for each in (once, often))
    assert staged.route is not None
    assert plain.route is not None
    other = [each for each in range(4) if each // 2 != rank // 2]
    rows = staged.route.send[1 - rank // 2], sum(plain.route.send[each] for each in other)
    return float(staged.rows.detach()[25]), *rows


def test_gradients_are_summed_in_the_node_and_rows_reach_it_once() -> None:
    left, once, often = zip(*run_on_ranks(one_row_and_many, 4))
    # By rank it would be ((1 + 1) + 2^25) - 2^25 = 0; by node it is (1 + 1) + (2^25 - 2^25).
    assert left == (2.0,) * 4
    assert (sum(once), sum(often)) == (2 * 20, 4 * 20)


def refused(rank: int, nodes: tuple[int, ...]) -> str:
    os.environ.update(LOCAL_WORLD_SIZE="1", GROUP_RANK=str(nodes[rank]))
    assert dist.group.WORLD is not None
    with pytest.raises(ConfigError) as caught:
        open_node_groups(dist.group.WORLD)
    return str(caught.value)


def test_where_it_cannot_be_is_refused_in_words() -> None:
    assert all("all ranks are on one node" in text for text in run_on_ranks(refused, 2, (0, 0)))
    assert why_no_node_stages([[0, 1], [2, 3]]) is None
    assert "nodes have 1 to 2 ranks" in (why_no_node_stages([[0, 1], [2]]) or "")
    assert "one rank a node" in (why_no_node_stages([[0], [1]]) or "")
