"""The entry for Ray Train: what it refuses, and, with a real local Ray, the one curve on two workers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from freescale.app import ray_train
from freescale.errors import ConfigError
from tests.ranks import run_on_ranks

SMALL = [
    "model.dim=16",
    "model.layers=1",
    "model.dropout=0",
    "model.dtype=float64",
    "data.global_batch=16",
    "run.device=cpu",
    "run.steps=6",
    "run.log_every=1",
]


def test_an_unknown_option_is_named():
    with pytest.raises(ConfigError, match="an option train_loop does not know: argument") as caught:
        ray_train.train_loop({"argument": []})
    assert "did you mean arguments?" in str(caught.value)


def test_a_relative_folder_is_refused():
    with pytest.raises(ConfigError, match=r"run\.out must be an absolute path under Ray"):
        ray_train.train_loop({"arguments": [*SMALL, "run.out=here"]})


def leave_rays_group(rank: int) -> tuple[bool, str]:
    ray_train._make_room_for_own_group()
    ray_train._make_room_for_own_group()  # nothing to leave any more
    left = not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return left, os.environ["MASTER_PORT"]


def test_rays_group_is_left_and_all_workers_know_the_same_port():
    (first, port), (second, other) = run_on_ranks(leave_rays_group, 2)
    assert first
    assert second
    assert port == other != "0"


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


@pytest.fixture
def local_ray():
    ray = pytest.importorskip("ray")
    # The workers find this checkout and the tests' interpreter, and nothing is sent anywhere.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    paths = os.pathsep.join(path for path in sys.path if path)
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    yield ray
    ray.shutdown()


@pytest.mark.extras
@pytest.mark.timeout(900)
def test_two_workers_of_ray_train_on_the_curve_of_one_process(local_ray, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from freescale.app.ray_train import train_loop

    result = TorchTrainer(
        train_loop,
        train_loop_config={"arguments": [*SMALL, f"run.out={tmp_path / 'two'}"]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "ray")),
    ).fit()
    assert result.return_value["status"] == "finished"
    alone = train_loop({"arguments": [*SMALL, f"run.out={tmp_path / 'one'}"]})
    assert alone["status"] == "finished"
    assert len(losses(tmp_path / "one")) == 6
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-12)
