"""MoE layers on a GPU: the CPU's curve, no wait for the host, deterministic, and clear errors that come late."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from freescale.errors import TrainingError
from freescale.model.parts.moe import MoE
from freescale.train.log.expert_load import ExpertLoad
from tests.gpu.test_on_gpu import train_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXPERTS = ("ffn.kind=moe", "ffn.hidden=16", "moe.experts=6", "moe.aux_loss=0.01", "moe.z_loss=0.001")


def make_moe(**options) -> MoE:
    torch.manual_seed(0)
    return MoE(dim=64, hidden=96, num_experts=8, top_k=2, **options).cuda()


def test_a_run_follows_the_cpus_curve(tmp_path: Path) -> None:
    recipe = ("model.dtype=float64", "run.steps=40", "run.eval_every=40", *EXPERTS)
    cpu, gpu = (train_on(device, tmp_path / device, *recipe) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu["losses"], cpu["losses"], rtol=1e-8)
    for name, value in cpu["tensors"].items():
        np.testing.assert_allclose(gpu["tensors"][name], value, rtol=0, atol=1e-7, err_msg=name)


def test_two_runs_in_half_precision_have_the_same_bits(tmp_path: Path) -> None:
    recipe = ("model.dtype=bfloat16", "model.dim=32", "ffn.hidden=32", "run.steps=30", "run.eval_every=30")
    recipe += ("ffn.kind=moe",)
    first, second = (train_on("cuda", tmp_path / name, *recipe) for name in ("a", "b"))
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0]
    for name, value in first["tensors"].items():
        np.testing.assert_array_equal(second["tensors"][name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_never_waits_for_the_device(dtype: torch.dtype) -> None:
    moe = make_moe(aux_loss=0.01, z_loss=0.01, shared=1)
    x = torch.randn(3000, 64, device="cuda", requires_grad=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = moe(x)
        y.float().square().sum().backward()

    step()  # compiles kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_logits_that_are_not_finite_are_told_when_the_step_asks() -> None:
    moe = make_moe()
    load = ExpertLoad(moe)
    x = torch.randn(100, 64, device="cuda")
    x[7, 3] = float("nan")
    assert moe(x).isnan().any()
    with pytest.raises(TrainingError, match=r"NaN or infinite[\s\S]*1 tokens"):
        load.check(load.counts(0))


def test_a_run_that_breaks_names_the_router(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"router logits of encoder.layers.0.feed_forward.ffn are NaN"):
        train_on("cuda", tmp_path, "run.steps=60", "optim.lr=1e30", *EXPERTS)
