"""Compressed histories on a GPU: the masked kernel, training and cached requests against the CPU; about a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from freescale.data.batches.segment_rule import SegmentRule
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.model import RequestGraph
from freescale.model.compression.compressor import Compressor
from freescale.model.compression.packed_caches import PackedCaches
from freescale.model.compression.token_cache import CacheStamp, TokenCache
from freescale.model.recommender import make_encoder
from freescale.model.views.cached_view import CachedView
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("softmax", [False, True])
def test_the_kernel_of_requests_gives_what_padded_products_give(
    dtype: torch.dtype, width: int, softmax: bool
) -> None:
    """All tile sizes, both biases, shared heads, caches in another precision than the queries."""
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    lengths, sizes = [50, 0, 130, 3], [(90, 90, 7), (5,), (), (90,) * 12]
    stamp = CacheStamp(model="m", length=90, summaries=4, dtype="bfloat16")
    caches = [
        TokenCache(
            keys=torch.randn(2, 4 * len(own), 2, width).bfloat16(),
            values=torch.randn(2, 4 * len(own), 2, width).bfloat16(),
            sizes=own,
            times=tuple(range(len(own))),
            stamp=stamp,
        )
        for own in sizes
    ]
    store = PackedCaches.pack(caches, device="cuda", stamp=stamp)
    total = sum(lengths)
    time = torch.randint(0, 5000, (total,), device="cuda").cumsum(0)
    batch = SequenceBatch(
        offsets=torch.tensor([0, *lengths]).cumsum(0), tokens={"time": time, "target_time": time + 77}
    )
    q, k, v = (torch.randn(total, heads, width, device="cuda").to(dtype) for heads in (4, 2, 2))
    bias = {"position_bias": torch.randn(1300, device="cuda"), "time_bias": torch.randn(129, device="cuda")}
    found = []
    for fused in (True, False):
        view = CachedView(batch, store, device=q.device, fused=fused)
        if softmax:
            found.append(view.softmax(q, k, v, layer=1, scale=width**-0.5))
        else:
            found.append(view.silu(q, k, v, layer=1, scale=0.02, **bias))
    got, wanted = (x.float() for x in found)
    assert (got - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2) * wanted.abs().max()


@pytest.mark.parametrize("kind", ["hstu", "sasrec", "llama"])
@pytest.mark.parametrize("half", [False, True])
def test_a_recorded_request_answers_as_a_new_one(kind: str, half: bool) -> None:
    """Recorded once, asked for other users, fewer of them and fewer events; also after new weights."""
    encoder, vectors, batch = make(kind, torch.float32)
    encoder, vectors, batch = encoder.cuda(), vectors.cuda(), batch.to("cuda")
    server = Compressor(encoder, model="m")  # type: ignore[arg-type]
    lengths = batch.lengths
    history = torch.from_numpy(RULE.history(lengths.numpy()))

    def events(
        first: torch.Tensor, last: torch.Tensor, users: list[int]
    ) -> tuple[torch.Tensor, SequenceBatch]:
        start = batch.offsets[:-1]
        rows = torch.cat(
            [torch.arange(int(start[u] + first[u]), int(start[u] + last[u])) for u in users]
        ).cuda()
        counts = torch.tensor([0, *(int(last[u] - first[u]) for u in users)])
        tokens = {name: values[rows] for name, values in batch.tokens.items()}
        return vectors[rows], SequenceBatch(offsets=counts.cumsum(0), tokens=tokens)

    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        store = server.compress(*events(torch.zeros_like(history), history, list(range(6))))
        assert isinstance(store, PackedCaches)
        graph = RequestGraph(server, store, users=6, recent=50, dim=64)
    for changed in (False, True):
        if changed:
            for param in encoder.parameters():
                param.data.mul_(1.1)
        for users in ([0, 1, 2, 3, 4, 5], [4], [5, 0, 5]):
            asked = events(history, lengths, users)
            got = graph.states(*asked, users)
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                wanted = server.states(*asked, store.select(users))
            assert (got - wanted).abs().max() < (2e-2 if half else 1e-5) * wanted.abs().max()


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
