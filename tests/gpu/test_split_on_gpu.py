"""Weight gradients after those of rows on a GPU: the bits of the plain order, for every model and number type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from freescale.comm.world.ranks import Ranks
from freescale.recipe import assembly, build_run, build_source, load_config
from freescale.train.log.events import Progress
from freescale.train.loop import train
from tests.small_run import SMALL, Recorder, full_tensors
from tests.train.compute.test_split_backward import MODELS, assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


STEPS = 300
RECIPE = ("model.dim=64", f"run.steps={STEPS}", "run.eval_every=0", "run.capture=off", "run.device=cuda")
ACCUMULATED = (
    "optim.accumulate=3",
    "optim.schedule=cosine",
    "optim.warmup_steps=50",
    "optim.weight_decay=0.01",
)


def trained(folder: Path, *keys: str, resume_from: Path | None = None) -> tuple[dict[str, Any], Any]:
    config = load_config(None, [*SMALL, *RECIPE, *keys, f"run.out={folder}"])
    seen = Recorder()
    ranks = Ranks(rank=0, num_ranks=1, device=torch.device("cuda"))
    run = build_run(config, build_source(config), ranks, Progress([seen]))
    train(run, resume_from=resume_from)
    learnt = {"losses": [event["loss"] for event in seen.of("step")], "tensors": full_tensors(run)}
    return learnt, run.train_step._split


@contextmanager
def postponing() -> Iterator[None]:
    """Inside, recipes postpone: one rank has no traffic to hide, so that they would not."""
    with patch.object(assembly, "postpone_bytes", lambda *args, **options: 1 << 30):
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns_the_same_bits(model: str, dtype: str, tmp_path: Path) -> None:
    keys = (*MODELS[model], f"model.dtype={dtype}")
    plain, split = trained(tmp_path / "plain", *keys)
    assert split is None
    with postponing():
        ours, split = trained(tmp_path / "split", *keys)
    assert split.postponed.num_postponed >= STEPS * 2
    assert_same_bits(ours, plain)
    assert np.mean(plain["losses"][-5:]) < np.mean(plain["losses"][:5])


@pytest.mark.parametrize("model", MODELS)
def test_accumulated_and_scheduled_they_are_the_same_and_so_they_go_on(model: str, tmp_path: Path) -> None:
    """From a checkpoint in the middle, which either order has saved, in the other one."""
    keys = (*MODELS[model], *ACCUMULATED, "model.dtype=bfloat16", "run.checkpoint_every=100", "run.keep=10")
    plain, _ = trained(tmp_path / "plain", *keys)
    with postponing():
        ours, split = trained(tmp_path / "split", *keys)
        assert split.postponed.num_postponed >= STEPS * 2
        assert_same_bits(ours, plain)
        saved = tmp_path / "plain" / "checkpoints" / "step-00000100"
        again, _ = trained(tmp_path / "plain", *keys, resume_from=saved)
        assert_same_bits(again, plain, first_step=100)
    saved = tmp_path / "split" / "checkpoints" / "step-00000200"
    again, _ = trained(tmp_path / "split", *keys, resume_from=saved)
    assert_same_bits(again, plain, first_step=200)
