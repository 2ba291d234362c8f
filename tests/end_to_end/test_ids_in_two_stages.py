"""Training on two nodes with ids in two stages: the bits of one stage, and the log says which way they take."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.ranks import run_on_ranks
from tests.small_run import full_tensors, make_run, train


def train_both_ways(rank: int, id_map: str, folder: Path) -> list[str]:
    """Four ranks on loopback that are told to be two nodes; what the run says of ids."""
    os.environ.update(LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    losses, tensors, said = [], [], []
    for ids in ("two_stage", "collective"):
        keys = [f"comm.ids={ids}", f"embedding.id_map={id_map}", "run.steps=6"]
        run, recorder = make_run(keys, folder / ids)
        train(run)
        losses.append([event["loss"] for event in recorder.of("step")])
        tensors.append(full_tensors(run))
        said += [event["text"] for event in recorder.of("notice") if "ids travel by" in event["text"]]
    two, one = losses
    assert len(two) == 6
    assert two == one
    for name, values in tensors[0].items():
        np.testing.assert_array_equal(values, tensors[1][name], err_msg=name)
    return said


@pytest.mark.parametrize("id_map", ["direct", "zero_collision"])
def test_a_run_has_the_bits_of_one_stage(tmp_path: Path, id_map: str) -> None:
    for said in run_on_ranks(train_both_ways, 4, id_map, tmp_path, timeout=100):
        two, one = said
        assert two.startswith(
            "ids travel by two_stage (gloo between nodes, unix sockets inside, no SM for what travels): "
            "as the recipe says; "
            "2 nodes of 2: 1 messages between nodes and 1 inside for each exchange of a rank, not 3"
        )
        assert one.startswith("ids travel by collective (gloo")
