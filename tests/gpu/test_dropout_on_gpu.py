"""Keyed dropout on a GPU: the bits of the CPU, nothing waited for, and recorded work that draws anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from freescale import Dropout, SequenceBatch, dropout_keys
from freescale.kernels import SequenceLayout
from freescale.kernels.dropout import (
    dropout,
    key_of_step,
    masked,
    padded_keys,
    reference,
    sample_keys,
    token_keys,
)
from freescale.model.encoders.hstu import HSTU
from freescale.model.parts.dropout import dropout_batch, dropout_step, number_sites
from tests.gpu.test_on_gpu import train_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [5, 0, 65, 300, 1]


def make_batch(device: str = "cuda") -> SequenceBatch:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    return SequenceBatch(offsets, {}, {"row": torch.tensor([9, 4, 2**40, 0, 17], device=device)})


def test_keys_are_those_of_the_cpu() -> None:
    key = torch.tensor([key_of_step(2**63 - 1, 12)])
    found = {}
    for device in ("cpu", "cuda"):
        batch = make_batch(device)
        step, rows = key.to(device), batch.samples["row"]
        layout = SequenceLayout(batch.offsets, device=device)
        keys = (
            token_keys(step, rows, layout),
            sample_keys(step, rows),
            padded_keys(step, rows, layout.longest),
        )
        found[device] = [each.cpu() for each in keys]
    for ours, wanted in zip(found["cuda"], found["cpu"], strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize(
    ("shape", "p", "dtype"),
    [
        ((1, 1), 0.1, torch.float32),
        ((371, 64), 0.3, torch.float64),
        ((371, 64), 0.3, torch.bfloat16),
        ((40, 3, 100), 0.95, torch.float32),
        ((2000, 512), 0.3, torch.float16),
        ((3, 5000), 0.1, torch.bfloat16),
    ],
)
def test_masks_and_gradients_have_the_bits_of_the_cpu(
    shape: tuple[int, ...], p: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(2, *shape).to(dtype)
    keys = torch.randint(-(2**62), 2**62, shape[:1])
    for site in (0, 1, 16, 2**31 - 1):
        mask = masked(keys, p=p, site=site)
        there = x.cuda().requires_grad_()
        out = dropout(there, masked(keys.cuda(), p=p, site=site))
        assert torch.equal(out.detach().cpu(), reference.dropout(x, *mask))
        assert torch.equal(out.detach().cpu(), dropout(x, mask))
        out.backward(grad.cuda())
        assert torch.equal(there.grad.cpu(), reference.dropout(grad, *mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_draw_the_masks_of_the_cpu_fused_or_not(dtype: torch.dtype, monkeypatch) -> None:
    def gradients(device: str, kind: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = HSTU(dim=64, layers=2, heads=2, max_length=300, dropout=0.3).to(device, kind)
        number_sites(model)
        batch = make_batch(device)
        vectors = torch.randn(batch.num_tokens, 64).to(device, kind).requires_grad_()
        layout = SequenceLayout(batch.offsets, device=device)
        with dropout_keys(seed=1, step=5, batch=batch):
            states = model(vectors, batch, layout)
        states.float().square().sum().backward()
        found = [states.detach(), vectors.grad, *(param.grad for param in model.parameters())]
        return [each.double().cpu() for each in found]

    truth = gradients("cpu", torch.float64)
    fused = gradients("cuda", dtype)
    monkeypatch.setattr("freescale.model.encoders.hstu.can_fuse_layer", lambda x, heads: False)
    apart = gradients("cuda", dtype)
    close = 2e-3 if dtype == torch.float32 else 0.06
    for ours, parts, wanted in zip(fused, apart, truth, strict=True):
        for found in (ours, parts):
            assert (found - wanted).norm() <= close * wanted.norm()


def test_nothing_waits_and_recorded_work_draws_by_the_key_it_finds() -> None:
    batch, module = make_batch(), Dropout(0.5, site=2)
    layout = SequenceLayout(batch.offsets, device="cuda")
    key = torch.zeros(1, dtype=torch.int64, device="cuda")
    x = torch.ones(batch.num_tokens, 64, device="cuda", requires_grad=True)
    grad = torch.ones(batch.num_tokens, 64, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        with dropout_step(key), dropout_batch(batch, layout):
            out = module(x)
        # Without its graph, which would keep the node of `x` on the stream that the first call ran on.
        return out.detach(), torch.autograd.grad(out, x, grad)[0]

    eager = []
    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3):
            key.fill_(key_of_step(1, number))
            eager.append(step())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.graph(graph):
        recorded = step()
    for number in (2, 0, 1):
        key.fill_(key_of_step(1, number))
        graph.replay()
        for ours, wanted in zip(recorded, eager[number], strict=True):
            assert torch.equal(ours, wanted)


def test_the_curve_with_dropout_is_that_of_the_cpu(tmp_path: Path) -> None:
    recipe = ("model.dtype=float64", "model.dropout=0.2", "run.steps=20", "run.eval_every=20")
    cpu, gpu = (train_on(device, tmp_path / device, *recipe) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu["losses"], cpu["losses"], rtol=1e-9)
