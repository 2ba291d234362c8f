"""Compressed histories on a GPU: the masked kernel, training and cached requests against the CPU; about a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from freescale.data.segment_rule import SegmentRule
from freescale.data.sequence_batch import SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.model.compressor import Compressor
from freescale.model.recommender import make_encoder
from tests.gpu.test_on_gpu import train_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RULE = SegmentRule(recent=50, length=90, summaries=4)
SEGMENTS = ("segments.recent=6", "segments.length=8", "segments.summaries=2", "synthetic.mean_length=20")


def make(kind: str, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.Tensor, SequenceBatch]:
    torch.manual_seed(0)
    lengths = [433, 51, 50, 7, 140, 500]
    encoder = make_encoder(
        kind,
        segments=RULE.__dict__,
        dim=64,
        layers=3,
        heads=2,
        max_length=500,
        dropout=0.0,
        position_bias=True,
        time_bias=True,
    )
    for name, param in encoder.named_parameters():
        if "position" in name or "time" in name or "summaries" in name:
            param.data.normal_(std=0.3)
    time = torch.randint(0, 50_000, (sum(lengths),)).cumsum(0)
    tokens = {"time": time, "target_time": torch.cat([time[1:], time[-1:]])}
    batch = SequenceBatch(offsets=torch.tensor([0, *lengths]).cumsum(0), tokens=tokens)
    return encoder.to(dtype).eval(), (torch.randn(sum(lengths), 64) * 0.3).to(dtype), batch


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_cached_requests_equal_the_masked_pass_in_full_float32(kind: str) -> None:
    torch.set_float32_matmul_precision("highest")
    encoder, vectors, batch = make(kind, torch.float32)
    encoder, vectors, batch = encoder.cuda(), vectors.cuda(), batch.to("cuda")
    with torch.no_grad():
        masked = encoder(vectors, batch, SequenceLayout(batch.offsets, device="cuda"))
    cached = Compressor(encoder, model="m").last_states(vectors, batch)  # type: ignore[arg-type]
    last = masked[(batch.offsets[1:] - 1).cuda()]
    torch.testing.assert_close(cached, last, rtol=0, atol=1e-5 * max(1.0, float(last.abs().max())))


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_the_masked_pass_and_its_gradients_are_those_of_the_cpu(kind: str) -> None:
    torch.set_float32_matmul_precision("highest")
    grads = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        encoder, vectors, batch = make(kind, dtype)
        encoder, vectors, batch = encoder.to(device), vectors.to(device).requires_grad_(), batch.to(device)
        states = encoder(vectors, batch, SequenceLayout(batch.offsets, device=device))
        weight = torch.linspace(-1, 1, states.numel(), device=device, dtype=dtype).view_as(states)
        inputs = [vectors, *encoder.parameters()]
        found = torch.autograd.grad((states * weight).sum(), inputs)
        grads.append([states.detach(), *found])
    # Softmax does not see a constant added to all keys: the gradient of their bias is zero, and rounding here.
    usual = float(torch.stack([wanted.abs().max() for wanted in grads[0]]).median())
    for wanted, got in zip(*grads):
        error = (got.cpu().double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3 * usual)
        assert error < 2e-4, error


def test_caches_move_between_devices() -> None:
    encoder, vectors, batch = make("hstu", torch.float32)
    old = SequenceBatch(offsets=torch.tensor([0, 300]), tokens={n: v[:300] for n, v in batch.tokens.items()})
    new = SequenceBatch(
        offsets=torch.tensor([0, 133]), tokens={n: v[300:433] for n, v in batch.tokens.items()}
    )
    on_cpu = Compressor(encoder, model="m")  # type: ignore[arg-type]
    cache = on_cpu.compress(vectors[:300], old)
    wanted = on_cpu.states(vectors[300:433], new, cache)
    on_gpu = Compressor(encoder.cuda(), model="m")  # type: ignore[arg-type]
    got = on_gpu.states(vectors[300:433].cuda(), new.to("cuda"), cache)
    torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=1e-4)


def test_training_follows_the_curve_of_the_cpu(tmp_path: Path) -> None:
    recipe = (*SEGMENTS, "run.steps=30", "model.dtype=float64")
    cpu, gpu = (train_on(device, tmp_path / device, *recipe) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu["losses"], cpu["losses"], rtol=1e-9)


def test_the_benchmark_of_costs_runs() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "compressed_cost.py"
    subprocess.run([sys.executable, str(script), "--rounds", "2"], check=True, timeout=600)
