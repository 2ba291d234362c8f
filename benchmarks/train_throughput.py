"""Tokens per second of an HSTU training step: jagged (ours) against the same model on padded batches.

Both compute the same function with the same weights on the same histories; the check at the start compares losses
and gradients. Lengths are those of ml-1m.txt, cut at 200 and uncut (FREESCALE_DATA or ../shared/data names the
folder; without the file, log-normal lengths with the same median and tail stand in and are reported as such).

    python benchmarks/train_throughput.py [--device cuda] [--batch 32] [--rounds 7]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.kernels import unit
from freescale.model.encoders.hstu import HSTU, HSTULayer
from freescale.model.heads import RetrievalHead
from freescale.model.recommender import Recommender
from freescale.pipeline import TABLE, PaddedBatch, Padder
from freescale.train.compute.padded_compute import PaddedCompute
from freescale.train.compute.recorder import Recorder

NUM_ITEMS, DIM, NUM_NEGATIVES = 3416, 50, 128


def ml1m_lengths() -> tuple[np.ndarray, str]:
    folder = Path(os.environ.get("FREESCALE_DATA", Path(__file__).parents[2] / "shared" / "data"))
    path = folder / "ml-1m.txt"
    if path.exists():
        users = np.loadtxt(path, dtype=np.int64, usecols=0)
        return np.bincount(users)[1:], "ml-1m.txt"
    drawn = np.random.default_rng(0).lognormal(np.log(96), 1.0, 6040)
    return np.clip(drawn, 20, 2277).astype(np.int64), "log-normal stand-in"


def make_batch(lengths: np.ndarray, rng: np.random.Generator, device: str) -> SequenceBatch:
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    ids = torch.from_numpy(rng.integers(NUM_ITEMS, size=(2, int(offsets[-1]))))
    negatives = torch.from_numpy(rng.integers(NUM_ITEMS, size=(len(lengths), NUM_NEGATIVES)))
    return SequenceBatch(
        offsets=offsets,
        tokens={"item_index": ids[0], "target_index": ids[1]},
        samples={"negative_index": negatives},
    ).to(device)


def jagged_loss(model: Recommender, table: Tensor, batch: SequenceBatch) -> Tensor:
    return model(table, batch) / batch.num_tokens


def padded_loss(model: Recommender, table: Tensor, batch: SequenceBatch) -> Tensor:
    """The same model as most code writes it: [B, longest] tensors, dense [B, heads, L, L] scores, masked sums."""
    return padded_loss_of(model, table, batch, *padded_input(batch, table.device))


def padded_input(batch: SequenceBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What is real, items and targets, all [B, longest]."""
    place = torch.arange(int(batch.lengths.max()), device=device)
    real = place < batch.lengths.to(device)[:, None]
    item, target = (_pad(batch.tokens[name], real) for name in ("item_index", "target_index"))
    return real, item, target


def padded_loss_of(
    model: Recommender, table: Tensor, batch: SequenceBatch, real: Tensor, item: Tensor, target: Tensor
) -> Tensor:
    longest = real.shape[1]
    encoder = model.encoder
    x = F.embedding(item, table) * DIM**0.5 + encoder.input.position[:longest]
    x = x * real[..., None]
    for layer in encoder.layers:
        x = _padded_layer(layer, x, real)
    states, rows = unit(x), unit(table)
    positive = (states * F.embedding(target, rows)).sum(-1, keepdim=True)
    slots = batch.samples["negative_index"]
    against = states @ F.embedding(slots, rows).transpose(1, 2)
    against = against.masked_fill(target[..., None] == slots[:, None, :], -5e4)
    logits = torch.cat([positive, against], -1) / model.head.temperature
    losses = logits.logsumexp(-1) - logits[..., 0]
    return (losses * real).sum() / batch.num_tokens


def _pad(values: Tensor, real: Tensor) -> Tensor:
    padded = values.new_zeros(real.shape)
    padded[real] = values
    return padded


def _padded_layer(layer: HSTULayer, x: Tensor, real: Tensor) -> Tensor:
    longest = x.shape[1]
    normed = F.layer_norm(x, x.shape[-1:], eps=1e-6)
    u, v, q, k = F.silu(normed @ layer.uvqk).chunk(4, dim=-1)
    q, k, v = (z.unflatten(-1, (layer.heads, -1)).transpose(1, 2) for z in (q, k, v))
    place = torch.arange(longest, device=x.device)
    bias = layer.bias.position[(place[:, None] - place[None, :]).clamp(min=0)]
    mask = torch.ones(longest, longest, device=x.device).tril() * real[:, None, None, :]
    weights = F.silu(q @ k.transpose(2, 3) + bias) * layer.scale * mask
    attended = F.layer_norm((weights @ v).transpose(1, 2).flatten(2), x.shape[-1:], eps=1e-6)
    return (x + layer.output(u * attended)) * real[..., None]


def gradients(
    loss: Callable[..., Tensor], model: nn.Module, table: Tensor, batch: SequenceBatch
) -> list[Tensor]:
    value = loss(model, table, batch)
    return [value.detach(), *torch.autograd.grad(value, [table, *model.parameters()])]


def check(model: Recommender, table: Tensor, batch: SequenceBatch) -> float:
    """Largest relative difference of loss and gradients; in float64 it must be rounding only."""
    wide, rows = model.double(), table.detach().double().requires_grad_()
    pairs = zip(*(gradients(loss, wide, rows, batch) for loss in (jagged_loss, padded_loss)))
    error = max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)
    model.float()
    assert error < 1e-9, f"padded and jagged differ by {error:.1e}: no speed is reported"
    return error


class Replayed:
    """Forward and backward as CUDA graphs, of batches made ready before: as captured training runs do it."""

    def __init__(self, model: Recommender, table: Tensor, longest: int) -> None:
        self._padder = Padder(table.device, longest=longest, table_rows={TABLE: NUM_ITEMS})
        recorder = Recorder(table.device)
        self._compute = PaddedCompute(
            model, list(model.parameters()), precision=nullcontext, recorder=recorder
        )
        self._table = table.detach()

    def ready(self, batch: SequenceBatch) -> PaddedBatch:
        """The batch on its device, padded, its size recorded."""
        here = batch.to("cpu")
        every = torch.arange(NUM_ITEMS)
        for _ in range(12):
            made = self._padder.pad(here, {TABLE: every}, global_tokens=batch.num_tokens)
            if self._compute.recordings.will_replay(made):
                return made
            self._compute.run({TABLE: self._table}, made)
        raise SystemExit("FAILED: a size was not recorded")

    def gradients(self, padded: PaddedBatch, model: nn.Module) -> list[Tensor]:
        """Loss, gradient of the table, gradients of the parameters."""
        loss, rows = self._compute.run({TABLE: self._table}, padded)
        return [loss.clone(), rows[TABLE].clone(), *(param.grad.clone() for param in model.parameters())]

    def seconds(self, padded: PaddedBatch) -> float:
        """How long one replay takes, copies of the batch and of the rows included."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._compute.run({TABLE: self._table}, padded)
        torch.cuda.synchronize()
        return time.perf_counter() - start


def replayed_padded(model: Recommender, table: Tensor, batch: SequenceBatch) -> Callable[[], None]:
    """The padded step of one batch as a CUDA graph; its input is padded before."""
    given = padded_input(batch, table.device)

    def step() -> None:
        value = padded_loss_of(model, table, batch, *given)
        torch.autograd.grad(value, [table, *model.parameters()])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.graph(graph, stream=side):
        step()
    return graph.replay


def clocked(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def time_step(loss: Callable[..., Tensor], model: nn.Module, table: Tensor, batch: SequenceBatch) -> float:
    if table.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    gradients(loss, model, table, batch)
    if table.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(
    lengths: np.ndarray, *, max_length: int, batch: int, rounds: int, device: str
) -> dict[str, float]:
    rng = np.random.default_rng(1)
    torch.manual_seed(0)
    cut = np.minimum(lengths, max_length)
    encoder = HSTU(dim=DIM, layers=2, heads=1, max_length=int(cut.max()))
    model = Recommender(encoder=encoder, head=RetrievalHead()).to(device)
    table = (torch.randn(NUM_ITEMS, DIM) * 0.02).to(device).requires_grad_()
    batches = [
        make_batch(cut[rng.choice(len(cut), batch, replace=False)], rng, device) for _ in range(rounds)
    ]
    error = check(model, table, make_batch(cut[rng.choice(len(cut), 4, replace=False)], rng, device))
    for loss in (jagged_loss, padded_loss):
        time_step(loss, model, table, batches[0])
    times: dict[str, list[float]] = {"jagged": [], "padded": []}
    if device == "cuda":
        times |= {"jagged_replayed": [], "padded_replayed": []}
        replayed = Replayed(model, table, int(cut.max()))
        ready = [replayed.ready(one) for one in batches]
        pairs = zip(replayed.gradients(ready[0], model), gradients(padded_loss, model, table, batches[0]))
        worst = max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)
        assert worst < 2e-2, f"FAILED: replayed and padded differ by {worst:.1e}"
    for number, one in enumerate(batches):
        if device == "cuda":
            times["jagged_replayed"].append(one.num_tokens / replayed.seconds(ready[number]))
            graph = replayed_padded(model, table, one)
            graph()
            times["padded_replayed"].append(one.num_tokens / clocked(graph))
            del graph
        times["jagged"].append(one.num_tokens / time_step(jagged_loss, model, table, one))
        times["padded"].append(one.num_tokens / time_step(padded_loss, model, table, one))
    ratios = [a / b for a, b in zip(times["jagged"], times["padded"])]
    waste = 1 - np.mean([one.num_tokens / (len(one) * int(one.lengths.max())) for one in batches])
    return {
        "max_length": max_length,
        "batch": batch,
        "padding_waste": round(float(waste), 3),
        "jagged_tokens_per_s": round(float(np.median(times["jagged"]))),
        "padded_tokens_per_s": round(float(np.median(times["padded"]))),
        "ratio": round(float(np.median(ratios)), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
        **_replayed_row(times),
        "difference_float64": error,
    }


def _replayed_row(times: dict[str, list[float]]) -> dict[str, float]:
    if "jagged_replayed" not in times:
        return {}
    found = {f"{way}_replayed_tokens_per_s": times[f"{way}_replayed"] for way in ("jagged", "padded")}
    row = {name: round(float(np.median(rates))) for name, rates in found.items()}
    for against in ("padded", "padded_replayed"):
        ratios = [a / b for a, b in zip(times["jagged_replayed"], times[against])]
        row[f"replayed_against_{against}"] = round(float(np.median(ratios)), 2)
        row[f"replayed_against_{against}_range"] = f"{min(ratios):.2f}-{max(ratios):.2f}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    lengths, name = ml1m_lengths()
    lengths = lengths - 3
    rows = [
        measure(lengths, max_length=cut, batch=options.batch, rounds=options.rounds, device=options.device)
        for cut in (200, int(lengths.max()))
    ]
    print(f"HSTU, 2 layers, dim {DIM}, {options.batch} histories a step, lengths of {name}, {options.device}")
    print(f"{'cut at':>8} {'waste':>7} {'jagged tok/s':>14} {'padded tok/s':>14} {'ratio':>7}  range")
    for row in rows:
        print(
            f"{row['max_length']:>8} {row['padding_waste']:>7.0%} {row['jagged_tokens_per_s']:>14,} "
            f"{row['padded_tokens_per_s']:>14,} {row['ratio']:>6.2f}x  {row['ratio_min']}-{row['ratio_max']}"
        )
        if "replayed_against_padded" in row:
            print(
                f"         as CUDA graphs: {row['jagged_replayed_tokens_per_s']:>9,} "
                f"{row['padded_replayed_tokens_per_s']:>14,} tok/s; jagged replayed {row['replayed_against_padded']}x "
                f"of padded ({row['replayed_against_padded_range']}), "
                f"{row['replayed_against_padded_replayed']}x of padded replayed"
            )
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    machine = {
        "hardware": gpu or f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }
    print(
        json.dumps(
            {
                "claim": "train_throughput",
                "lengths": name,
                "rows": rows,
                **machine,
                "date": str(datetime.date.today()),
            }
        )
    )


if __name__ == "__main__":
    main()
