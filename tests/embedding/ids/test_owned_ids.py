"""Ids over ranks: the same rows, values and evictions on any number of them."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from freescale.embedding import SGD, Adam, RowwiseAdagrad, SparseOptimizer
from freescale.embedding.ids.eviction import LRU, Eviction
from freescale.embedding.ids.id_stats import COUNTS
from freescale.embedding.ids.sharded_id_map import ShardedIdMap, gather_ids
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.errors import PlanError
from freescale.kernels.id_table.layout import make_layout
from tests.effort import slow
from tests.ranks import run_on_ranks

OPTIMIZERS: dict[str, SparseOptimizer] = {"sgd": SGD(), "rowwise_adagrad": RowwiseAdagrad(), "adam": Adam()}


def make(
    optimizer: str = "adam",
    *,
    rows: int = 256,
    buckets: int = 8,
    eviction: Eviction | None = None,
    **options: Any,
) -> tuple[ShardedEmbedding, ShardedIdMap]:
    layout = make_layout(rows, num_buckets=buckets, max_probe=6)
    spec = TableSpec(
        name="item",
        num_rows=layout.num_rows,
        row_group=layout.bucket_rows,
        dim=5,
        optimizer=OPTIMIZERS[optimizer],
        dtype=torch.float64,
        seed=3,
    )
    group = dist.group.WORLD if dist.is_initialized() else None
    embedding = ShardedEmbedding([spec], group=group, replicate_below_mb=100)
    return embedding, ShardedIdMap(embedding, "item", max_probe=6, eviction=eviction, guard=1, **options)


def batch_of(step: int) -> torch.Tensor:
    """The global batch: ids that drift, with repeats."""
    rng = np.random.default_rng(step)
    return torch.from_numpy(rng.integers(40 * step, 40 * step + 150, 120) * 2654435761)


def my_part(batch: torch.Tensor) -> torch.Tensor:
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # Uneven on purpose: the first rank gets most, the last of many nothing.
    edges = [0, *(int(len(batch) * (r / num_ranks) ** 0.5) for r in range(1, num_ranks)), len(batch)]
    return batch[edges[rank] : edges[rank + 1]]


def train(embedding: ShardedEmbedding, ids: ShardedIdMap, steps: range) -> list[list[int]]:
    """A few steps whose gradient depends on the id alone; gives the rows of each whole batch."""
    seen = []
    for step in steps:
        mine = my_part(batch_of(step))
        rows = ids.rows(mine, step=step)
        lookup = embedding.lookup("item", rows)
        (lookup.vectors() * (mine % 7 + 1).double()[:, None]).sum().backward()
        embedding.update(lookup, lr=0.1, step=step + 1)
        parts: list[Any] = [rows]
        if dist.is_initialized():
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, rows)
        seen.append(torch.cat(parts).tolist())
    return seen


def whole_state(embedding: ShardedEmbedding, ids: ShardedIdMap) -> dict[str, np.ndarray]:
    tensors = {**embedding.state_dict(), **ids.state_dict()}
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).numpy().copy()
        for name, value in tensors.items()
    }


def one_run(rank: int, optimizer: str, policy: str, options: dict[str, Any]) -> dict[str, Any]:
    embedding, ids = make(optimizer, eviction=LRU() if policy == "lru" else None, **options)
    rows = train(embedding, ids, range(8))
    counts = torch.stack([ids.take_counts(step) for step in range(8)]).sum(0)
    if dist.is_initialized():
        dist.all_reduce(counts)
    evicted = gather_ids(ids.take_evicted(), dist.group.WORLD if dist.is_initialized() else None)
    known = ids.rows(batch_of(3)).tolist()
    return {
        "rows": rows,
        "state": whole_state(embedding, ids),
        "counts": counts.tolist(),
        "evicted": evicted.tolist(),
        "known": known,
    }


EXACT = {"admit_after": 2, "admission": "exact"}


@pytest.mark.parametrize(
    ("num_ranks", "optimizer", "policy", "options"),
    [
        slow(2, "adam", "lru", {}),
        slow(3, "adam", "lru", {}),
        (3, "adam", "lru", {"buckets": 2}),  # more ranks than buckets
        slow(2, "sgd", "lru", EXACT),
        (3, "sgd", "lru", EXACT),
        (3, "rowwise_adagrad", "none", {"admit_after": 2}),
    ],
)
def test_any_number_of_ranks_gives_the_same_rows_and_values(
    num_ranks: int, optimizer: str, policy: str, options: dict[str, Any]
) -> None:
    alone = one_run(0, optimizer, policy, options)
    for result in run_on_ranks(one_run, num_ranks, optimizer, policy, options):
        assert result["rows"] == alone["rows"]
        assert result["counts"] == alone["counts"]
        assert result["evicted"] == alone["evicted"]
        assert result["known"] == alone["known"]
        for name, value in alone["state"].items():
            np.testing.assert_allclose(result["state"][name], value, rtol=1e-12, atol=1e-12, err_msg=name)
    named = dict(zip(COUNTS, alone["counts"]))
    assert named["asked"] == sum(len(set(batch_of(step).tolist())) for step in range(8))
    assert (named["evictions"] > 0) == (policy == "lru")


def save_part(rank: int, folder: str) -> None:
    embedding, ids = make(eviction=LRU())
    train(embedding, ids, range(4))
    save({**embedding.state_dict(), **ids.state_dict()}, checkpoint_id=folder)


def go_on(rank: int, folder: str, steps: range, target: str | None) -> dict[str, Any]:
    embedding, ids = make(eviction=LRU())
    load(
        {**embedding.state_dict(), **ids.state_dict()},
        checkpoint_id=folder,
        no_dist=not dist.is_initialized(),
    )
    ids.restored()
    rows = train(embedding, ids, steps)
    if target is not None:
        save({**embedding.state_dict(), **ids.state_dict()}, checkpoint_id=target)
    return {"rows": rows, "state": whole_state(embedding, ids)}


def test_four_ranks_then_two_then_three_then_one() -> None:
    embedding, ids = make(eviction=LRU())
    truth = train(embedding, ids, range(12))
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(save_part, 4, f"{folder}/4")
        two = run_on_ranks(go_on, 2, f"{folder}/4", range(4, 7), f"{folder}/2")[0]
        three = run_on_ranks(go_on, 3, f"{folder}/2", range(7, 10), f"{folder}/3")[0]
        one = go_on(0, f"{folder}/3", range(10, 12), None)
    assert two["rows"] + three["rows"] + one["rows"] == truth[4:]
    for name, value in whole_state(embedding, ids).items():
        np.testing.assert_allclose(one["state"][name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_row_that_changes_owner_starts_afresh(optimizer: str) -> None:
    embedding, ids = make(optimizer, eviction=LRU())
    train(embedding, ids, range(6))
    table = embedding.tables["item"]
    before = dict(zip(*(part.tolist() for part in ids.residents())))
    owner_of = {row: id_ for id_, row in before.items()}
    asked = torch.arange(10**6, 10**6 + 40)
    rows = ids.rows(asked, step=6)
    taken = [(id_, row) for id_, row in zip(asked.tolist(), rows.tolist()) if row in owner_of]
    assert len(taken) > 5
    fresh_embedding, fresh = make(optimizer)
    for id_, row in taken:
        assert all(bool((values[row] == 0).all()) for values in table.state.values())
        # The same values as the id gets anywhere: they come from (seed, id) alone.
        there = int(fresh.rows(torch.tensor([id_]), step=0))
        assert torch.equal(table.weight[row], fresh_embedding.tables["item"].weight[there])
    assert set(ids.take_evicted().tolist()) >= {owner_of[row] for _, row in taken}


def test_looking_up_changes_nothing() -> None:
    embedding, ids = make(eviction=LRU())
    train(embedding, ids, range(3))
    before = whole_state(embedding, ids)
    rows = ids.rows(torch.arange(10**9, 10**9 + 500))
    assert bool((rows % ids.map.layout.bucket_rows >= ids.map.layout.bucket_slots).all())
    for name, value in whole_state(embedding, ids).items():
        np.testing.assert_array_equal(value, before[name])


def test_an_evicted_id_that_came_back_is_not_reported() -> None:
    _, ids = make(rows=128, buckets=1, eviction=LRU())
    first = torch.arange(100)
    ids.rows(first, step=0)
    for step in range(1, 4):
        ids.rows(torch.arange(1000 * step, 1000 * step + 100), step=step)
    ids.rows(first[:20], step=4)
    gone = set(ids.take_evicted().tolist())
    back = {id_ for id_ in first[:20].tolist() if int(ids.map.lookup(torch.tensor([id_]))) >= 0}
    assert back
    assert not gone & back
    assert gone == gone - set(ids.residents()[0].tolist())


def test_a_table_of_another_shape_is_refused() -> None:
    spec = TableSpec(name="item", num_rows=300, row_group=100, dim=2, optimizer=SGD())
    with pytest.raises(PlanError, match="does not fit its id map"):
        ShardedIdMap(ShardedEmbedding([spec]), "item", num_buckets=7)
