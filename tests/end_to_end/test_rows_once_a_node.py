"""Training with rows asked for once a node: the curve of one rank, and the same bits plain and prioritized."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.errors import ConfigError
from tests.effort import slow
from tests.ranks import run_on_ranks
from tests.small_run import make_run, train_small
from tests.test_one_curve_features import TABLES

KEYS = ("model.dtype=float64", "run.steps=5", "pipeline.decide_every=null")


def train_on_two_nodes(rank: int, folder: Path, tables: tuple[str, ...]) -> list[dict[str, Any]]:
    os.environ.update(LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    return [
        train_small([*KEYS, *tables, "comm.dedup=node", f"pipeline.prioritized={way}"], folder / way)
        for way in ("true", "false")
    ]


@pytest.mark.parametrize("tables", [(), slow(TABLES)], ids=["items", "six tables"])
def test_a_run_keeps_the_curve_of_one_rank(tmp_path: Path, tables: tuple[str, ...]) -> None:
    alone = train_small([*KEYS, *tables, "comm.dedup=node"], tmp_path / "alone")
    hidden, plain = run_on_ranks(train_on_two_nodes, 4, tmp_path, tables, timeout=100)[0]
    assert hidden["losses"] == plain["losses"]
    np.testing.assert_allclose(hidden["losses"], alone["losses"], rtol=1e-9)
    assert len(alone["losses"]) == 5
    for name, values in alone["tensors"].items():
        np.testing.assert_allclose(hidden["tensors"][name], values, rtol=1e-9, atol=1e-9, err_msg=name)
        np.testing.assert_array_equal(hidden["tensors"][name], plain["tensors"][name], err_msg=name)


def refuse(rank: int) -> str:
    with pytest.raises(ConfigError) as caught:
        make_run(["comm.dedup=node"])
    return str(caught.value)


def test_one_node_is_refused_in_words() -> None:
    for text in run_on_ranks(refuse, 2):
        assert "comm.dedup=node cannot be used here: all ranks are on one node" in text
