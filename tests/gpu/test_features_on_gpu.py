"""Features on a GPU: the curve of the CPU, whether a thread makes batches ready or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from freescale.comm.world.ranks import Ranks
from freescale.recipe import build_run, build_source, load_config
from freescale.train.log.events import Progress
from freescale.train.loop import train
from tests.small_run import SMALL, Recorder, full_tensors
from tests.test_one_curve_features import TABLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(folder: Any, device: str, *keys: str) -> dict[str, Any]:
    config = load_config(None, [*SMALL, *TABLES, *keys, f"run.device={device}", f"run.out={folder}/{device}"])
    seen = Recorder()
    ranks = Ranks(rank=0, num_ranks=1, device=torch.device(device))
    run = build_run(config, build_source(config), ranks, Progress([seen]))
    train(run, resume_from=None)
    return {"losses": [event["loss"] for event in seen.of("step")], "tensors": full_tensors(run)}


@pytest.mark.parametrize("keys", [(), ("pipeline.ahead=false", "tokens.join=mlp")])
def test_the_curve_is_that_of_the_cpu(tmp_path: Any, keys: tuple[str, ...]) -> None:
    cpu, gpu = (trained(tmp_path, device, *keys, "run.steps=12") for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu["losses"], cpu["losses"], rtol=1e-9)
    for name, value in cpu["tensors"].items():
        np.testing.assert_allclose(gpu["tensors"][name], value, rtol=0, atol=1e-8, err_msg=name)


def test_half_precision_learns(tmp_path: Any) -> None:
    losses = trained(tmp_path, "cuda", "model.dtype=bfloat16", "run.steps=60")["losses"]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
