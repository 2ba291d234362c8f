"""Weight gradients after those of rows on a GPU: the bits of the plain order, for every model and number type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def trained(folder: Path, *keys: str, device: str = "cuda") -> tuple[dict[str, Any], Any]:
    config = load_config(
        None, [*SMALL, *keys, "run.capture=off", f"run.device={device}", f"run.out={folder}"]
    )
    seen = Recorder()
    ranks = Ranks(rank=0, num_ranks=1, device=torch.device(device))
    run = build_run(config, build_source(config), ranks, Progress([seen]))
    train(run, resume_from=None)
    learnt = {"losses": [event["loss"] for event in seen.of("step")], "tensors": full_tensors(run)}
    return learnt, run.train_step._split


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["hstu", "sasrec", "llama"])
def test_every_model_learns_the_same_bits(
    model: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = (*MODELS[model], f"model.dtype={dtype}", "model.dim=64", "run.steps=30", "run.eval_every=0")
    plain, split = trained(tmp_path / "plain", *keys)
    assert split is None
    # One rank has no traffic to hide, so that the recipe would not do it.
    monkeypatch.setattr(assembly, "postpone_bytes", lambda *args, **options: 1 << 30)
    ours, split = trained(tmp_path / "split", *keys)
    assert split.postponed.num_postponed >= 30 * 4
    assert_same_bits(ours, plain)
    assert np.mean(plain["losses"][-5:]) < np.mean(plain["losses"][:5])
