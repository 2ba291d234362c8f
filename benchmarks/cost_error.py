r"""How well costs are known: held-out error of batches as the balancer makes them, by what the cost model counts.

Batches are those of a training run on N ranks: global batches cut and shared out by the balancer, one part of each
trained here, forward and backward timed (median of three). Then models are fitted to some and tried on the others, five
times over. What each counts:

    lengths   samples, tokens, squared lengths: the shipped model
    tiles     the same, but attention as the tiles a kernel works through (sides of 64 and of 128)
    waves     tiles, and products in whole rounds of the device's multiprocessors
    spread    how far one batch is off its own median when it comes again: no model gets below that

    python benchmarks/cost_error.py                                       # this machine's GPU, or CPU
    python benchmarks/cost_error.py --seconds 40 --ranks 8 --samples 32   # one H200
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freescale.balance import CostModel, GlobalBatches, IntArray, assign, named_balancer
from freescale.comm.world import device_name, pick_device
from freescale.profiling.fits import repeat_spread
from freescale.profiling.step_times import measure_steps
from freescale.recipe import build_examples, build_source, load_config

GPU_KEYS = (
    "model.layers=8", "model.dim=512", "model.heads=4", "model.dtype=bfloat16", "model.dropout=0",
    "data.max_length=4096", "synthetic.mean_length=400", "synthetic.max_length=4096", "synthetic.users=4000",
)  # fmt: skip
CPU_KEYS = (
    "model.dropout=0", "data.max_length=1000", "synthetic.mean_length=100", "synthetic.sigma=1.2",
    "synthetic.max_length=1000", "synthetic.users=1000", "synthetic.items=5000",
)  # fmt: skip
FOLDS = 5


def batches_of(lengths: IntArray, *, ranks: int, samples: int) -> Iterator[IntArray]:
    """Rows of one rank of every step, as a run on so many ranks plans them; ranks take turns."""
    batches = GlobalBatches(lengths, global_batch=ranks * samples, seed=0)
    for step in itertools.count():
        rows = batches.batch(step)
        plan = assign(
            CostModel.default().cost(lengths[rows]),
            tokens=lengths[rows],
            num_ranks=ranks,
            balancer=named_balancer("lpt"),
            max_tokens_ratio=1.10,
            speeds=None,
        )
        yield rows[plan.owner == step % ranks]


def tiles(lengths: np.ndarray, side: int) -> float:
    """Pairs that tiles of this side cover, twice."""
    count = np.ceil(lengths / side)
    return float((side * side * count * (count + 1)).sum())


def rounds(tokens: float, width: int, *, multiprocessors: int) -> float:
    """Products of all tokens with a matrix of this width, in whole rounds of tiles of 128 x 128."""
    return float(np.ceil(np.ceil(tokens / 128) * np.ceil(width / 128) / multiprocessors))


def held_out(features: np.ndarray, ms: np.ndarray) -> tuple[float, float]:
    """Median and 90 % of the relative error on batches that a fit has not seen."""
    errors = np.empty(len(ms))
    for fold in range(FOLDS):
        out = np.arange(len(ms)) % FOLDS == fold
        scale = features[~out].max(axis=0)
        design = features[~out] / scale / ms[~out, None]
        coefficients = least_squares(design) / scale
        errors[out] = np.abs(features[out] @ coefficients / ms[out] - 1)
    return float(np.median(errors)), float(np.quantile(errors, 0.9))


def least_squares(design: np.ndarray) -> np.ndarray:
    """Coefficients that are not negative, with the least relative error; those below zero are left out in turn."""
    used = np.ones(design.shape[1], dtype=bool)
    found = np.zeros(design.shape[1])
    while used.any():
        part = np.linalg.lstsq(design[:, used], np.ones(len(design)), rcond=None)[0]
        if (part >= 0).all():
            found[used] = part
            return found
        worst = np.flatnonzero(used)[part.argmin()]
        used[worst] = False
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=32, help="a rank")
    parser.add_argument(
        "--keep", type=Path, help="write lengths and times here, as .npz, to try other models on"
    )
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    device = pick_device(options.device)
    config = load_config(None, [*(GPU_KEYS if device.type == "cuda" else CPU_KEYS), *options.keys])
    lengths = build_examples(config, build_source(config), "train", negatives=True).lengths()
    seen: list[np.ndarray] = []

    def noted() -> Iterator[IntArray]:
        for rows in batches_of(lengths, ranks=options.ranks, samples=options.samples):
            seen.append(lengths[rows].astype(np.float64))
            yield rows

    steps = measure_steps(
        config, device, seconds=options.seconds, most_samples=2 * options.samples, batches=noted()
    )
    ms = np.array([one.ms + two.ms for one, two in zip(steps.steps["forward"], steps.steps["backward"])])
    sizes = seen[: len(ms)]
    if options.keep is not None:
        parts = {name: [one.ms for one in steps.steps[name]] for name in ("forward", "backward")}
        counts = [len(one) for one in sizes]
        np.savez(options.keep, lengths=np.concatenate(sizes), counts=counts, **parts)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    dim, tokens = config.model.dim, [float(one.sum()) for one in sizes]
    base = [[1.0, len(one), one.sum()] for one in sizes]
    wide = [[rounds(n, w, multiprocessors=sms) for w in (dim, 4 * dim)] for n in tokens]
    kinds: dict[str, Callable[[int], list[float]]] = {
        "lengths": lambda n: [*base[n], float((sizes[n] ** 2).sum())],
        "tiles of 64": lambda n: [*base[n], tiles(sizes[n], 64)],
        "tiles of 128": lambda n: [*base[n], tiles(sizes[n], 128)],
        "tiles of 64 and waves": lambda n: [*base[n], tiles(sizes[n], 64), *wide[n]],
    }
    print(
        f"{device_name(device)}: {len(ms)} batches of about {np.mean(tokens):,.0f} tokens, {np.median(ms):.2f} ms\n"
    )
    print(f"{'':<24}{'median':>9}{'90 %':>9}")
    rows: dict[str, Any] = {}
    for name, of in kinds.items():
        middle, most = held_out(np.array([of(n) for n in range(len(ms))]), ms)
        rows[name] = {"median": middle, "worst": most}
        print(f"{name:<24}{middle:>9.2%}{most:>9.2%}", flush=True)
    spread = repeat_spread(steps.same)
    print(f"{'one batch again':<24}{spread:>9.2%}")
    print(
        json.dumps(
            {
                "claim": "cost_error", "device": device_name(device), "date": str(datetime.date.today()),
                "batches": len(ms), "tokens": float(np.mean(tokens)), "ms": float(np.median(ms)), "rows": rows,
                "spread": spread,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
