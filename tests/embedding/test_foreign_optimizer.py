"""An optimizer of somebody else: trained, sharded, saved, resharded, reset and moved ahead like those that ship."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import tests.extend.plugins.own_optimizer  # noqa: F401  (what --plugin does)
from freescale.embedding import make_optimizer
from freescale.embedding.ids.eviction import LRU
from freescale.embedding.sharding.plan import TableSpec
from freescale.errors import ConfigError
from freescale.registry import names
from tests.embedding.ids import test_owned_ids as learnt
from tests.pipeline.prioritized.test_pipeline import assert_same
from tests.pipeline.two_paths import channels_of, random_batches
from tests.ranks import run_on_ranks

OPTIMIZER = make_optimizer("slowing_momentum", decay=0.5)
learnt.OPTIMIZERS["momentum"] = OPTIMIZER


def test_it_is_made_by_name_with_its_own_options() -> None:
    assert names("optimizer")[-1] == "slowing_momentum"
    assert make_optimizer("slowing_momentum").decay == 0.75  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="optimizer 'slowing_momentum' has no option 'beta1'"):
        make_optimizer("slowing_momentum", beta1=0.9)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_and_rows_that_change_owner(num_ranks: int) -> None:
    alone = learnt.one_run(0, "momentum", "lru", {})
    assert {"item.weight", "item.velocity", "item.updates"} <= set(alone["state"])
    assert alone["evicted"]
    for result in run_on_ranks(learnt.one_run, num_ranks, "momentum", "lru", {}):
        assert result["rows"] == alone["rows"]
        for name, value in alone["state"].items():
            np.testing.assert_allclose(result["state"][name], value, rtol=1e-12, atol=1e-12, err_msg=name)


def test_a_row_with_a_new_owner_has_no_trace_of_old_state() -> None:
    embedding, ids = learnt.make("momentum", eviction=LRU())
    learnt.train(embedding, ids, range(3))
    table = embedding.tables["item"]
    rows = (table.state["updates"][:, 0] > 0).nonzero().flatten()[:5]
    table.reset(rows, torch.arange(5))
    assert all(bool((values[rows] == 0).all()) for values in table.state.values())
    assert bool((table.state["updates"] > 0).any())


def go_on(rank: int, source: str | None, steps: range, target: str | None) -> Any:
    embedding, ids = learnt.make("momentum", eviction=LRU())
    state = {**embedding.state_dict(), **ids.state_dict()}
    if source is not None:
        load(state, checkpoint_id=source, no_dist=not dist.is_initialized())
        ids.restored()
    learnt.train(embedding, ids, steps)
    if target is not None:
        save({**embedding.state_dict(), **ids.state_dict()}, checkpoint_id=target)
    return learnt.whole_state(embedding, ids)


def test_saved_by_three_ranks_it_goes_on_with_two_and_one() -> None:
    truth = go_on(0, None, range(8), None)
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(go_on, 3, None, range(3), f"{folder}/3")
        run_on_ranks(go_on, 2, f"{folder}/3", range(3, 6), f"{folder}/2")
        one = go_on(0, f"{folder}/2", range(6, 8), None)
    for name, value in truth.items():
        np.testing.assert_allclose(one[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


def both_paths(rank: int, num_ranks: int) -> int:
    for dtype in (torch.float32, torch.bfloat16):
        spec = TableSpec(name="item", num_rows=61, dim=7, optimizer=OPTIMIZER, dtype=dtype, init_std=1.0)
        batches = random_batches(num_ranks, [spec], 25, rank, num_ranks)
        traffic = assert_same([spec], batches, channels=channels_of(sockets=False), check=True)
    return int(sum(each.total.parked_rows for each in traffic))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_moved_ahead_it_gives_the_same_bits(num_ranks: int) -> None:
    assert sum(run_on_ranks(both_paths, num_ranks, num_ranks)) > 0
