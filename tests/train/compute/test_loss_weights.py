"""Weights of tasks are counted on the host, from the batch as it was loaded: a device is not waited for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from freescale.model.heads.tasks import TasksHead
from freescale.recipe import build_run, build_source, load_config
from freescale.train import Progress, take_steps
from tests.small_run import these_ranks

RECIPE = Path(__file__).parents[3] / "recipes" / "mlperf_dlrmv4_small.yaml"
KEYS = (
    "run.steps=2",
    "data.scale=0.00003",
    "data.global_batch=4",
    "model.dim=8",
    "run.device=cpu",
    "run.eval_every=0",
)


def test_weights_come_from_the_loaded_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    counted: list[Any] = []
    loaded: list[Any] = []
    loss_weights = TasksHead.loss_weights

    def watched(self: TasksHead, batch: Any) -> torch.Tensor:
        counted.append(batch)
        return loss_weights(self, batch)

    monkeypatch.setattr(TasksHead, "loss_weights", watched)
    config = load_config(RECIPE, [*KEYS, f"run.out={tmp_path}"])
    run = build_run(config, build_source(config), these_ranks(), Progress())
    step = run.train_step.run

    def one(ready: Any, schedule: Any) -> Any:
        loaded.append(ready.loaded)
        return step(ready, schedule)

    monkeypatch.setattr(run.train_step, "run", one)
    with run.open_schedule(0) as schedule:
        take_steps(run, schedule)
    assert len(counted) == 2
    assert all(batch is own for batch, own in zip(counted, loaded, strict=True))
