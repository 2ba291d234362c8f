"""How long the parts of a training step take, over batches of many sizes and lengths."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from freescale.balance import FloatArray, MeasuredStep
from freescale.data import BatchFeatures, IntArray
from freescale.embedding import ShardedEmbedding
from freescale.profiling.step_meter import StepMeter
from freescale.recipe import Config, asked_ids
from freescale.sim import BY_LAYER, TableLoad, write_tables

PARTS = ("forward", "backward", "weights", "optimizer", BY_LAYER, "find", "gather", "update", "host")
# Fewer shapes than this cannot tell fixed, linear and quadratic cost apart and leave some to test on.
FEWEST_SHAPES = 20
_REPEATS = 3
_SAME = 24
"""Repeats of one batch near the operating point: what a step varies by itself, whatever the fit is worth."""


@dataclass
class StepTimes:
    """What was measured: for each part its steps, as (samples, tokens or rows, squares, ms).

    Args:
        steps: the median of the repeats of each shape.
        singles: every repeat of forward and backward together, for the spread.
        same: forward and backward of one batch, again and again.
        longest: the longest history of all batches.
        dense_parameters: of the model.
        row_bytes: of a row as it travels; of several tables, the mean of all rows that steps have looked up.
        tables: what is known of them, where features have rows in some.
        num_postponed: weight gradients that waited, over all batches.
        num_without_room: others that would have, and were computed at once for want of memory.
    """

    steps: dict[str, list[MeasuredStep]] = field(default_factory=lambda: {name: [] for name in PARTS})
    singles: list[MeasuredStep] = field(default_factory=list)
    same: list[MeasuredStep] = field(default_factory=list)
    longest: int = 0
    dense_parameters: int = 0
    row_bytes: int = 0
    tables: str = ""
    num_postponed: int = 0
    num_without_room: int = 0

    @property
    def share_without_room(self) -> float:
        """Of all weight gradients that could have waited."""
        return self.num_without_room / max(1, self.num_without_room + self.num_postponed)


def measure_steps(
    config: Config,
    device: torch.device,
    *,
    seconds: float,
    most_samples: int,
    batches: Iterable[IntArray] | None = None,
) -> StepTimes:
    """Train on batches of many shapes until the time is over; at least FEWEST_SHAPES of them.

    `batches` are rows of batches to train on instead, without end.
    """
    meter = StepMeter(config, device)
    found = StepTimes(
        dense_parameters=sum(each.numel() for each in meter.model.parameters()),
        row_bytes=config.model.dim * 4,
    )
    if meter.features is not None:
        found.tables = write_tables(table_loads(config, meter.features, meter.embedding))
    began, seed = time.monotonic(), config.run.seed
    lengths = meter.examples.lengths()
    for number, rows in enumerate(batches or shapes(lengths, most_samples=most_samples, seed=seed)):
        if number >= FEWEST_SHAPES and time.monotonic() - began > seconds:
            break
        if number < 3:
            meter.step(rows, 0)  # compiles kernels, fills caches
            meter.weight_gradients(rows, 0)
        repeats = [meter.step(rows, number * _REPEATS + turn) for turn in range(_REPEATS)]
        repeats[0]["weights"] = meter.weight_gradients(rows, number * _REPEATS)
        _keep(found, lengths[rows], repeats)
    usual = usual_rows(lengths, most_samples=most_samples, seed=seed)
    same = [meter.step(usual, 1) for _ in range(_SAME)]
    found.same = [_both_ways(lengths[usual].astype(np.float64), ms) for ms in same]
    if meter.num_rows:
        found.row_bytes = round(meter.num_row_bytes / meter.num_rows)
    found.num_postponed, found.num_without_room = meter.num_postponed, meter.num_without_room
    return found


def table_loads(config: Config, features: BatchFeatures, embedding: ShardedEmbedding) -> list[TableLoad]:
    """Every table of a recipe, for `freescale simulate`."""
    asked = asked_ids(config, features)
    specs = {name: plan.spec for name, plan in embedding.plans.items()}
    return [
        TableLoad(name, specs[name].num_rows, 4 * specs[name].dim, each.per_event, each.per_sample)
        for name, each in asked.items()
    ]


def _keep(found: StepTimes, rows: IntArray, repeats: list[dict[str, float]]) -> None:
    lengths = rows.astype(np.float64)
    middle = {name: float(np.median([one[name] for one in repeats if name in one])) for name in repeats[0]}
    found.longest = max(found.longest, int(lengths.max(initial=0)))
    for name in ("forward", "backward", "weights", "host"):
        found.steps[name].append(MeasuredStep.of(lengths, ms=middle[name]))
    counts = {
        "find": middle["asked"],
        "gather": middle["rows"],
        "update": middle["rows"],
        "optimizer": 0.0,
        BY_LAYER: 0.0,
    }
    for name, count in counts.items():
        found.steps[name].append(MeasuredStep(num_samples=0, tokens=int(count), squares=0.0, ms=middle[name]))
    found.singles += [_both_ways(lengths, one) for one in repeats]


def _both_ways(lengths: FloatArray, ms: dict[str, float]) -> MeasuredStep:
    return MeasuredStep.of(lengths, ms=ms["forward"] + ms["backward"])


def usual_rows(lengths: IntArray, *, most_samples: int, seed: int) -> IntArray:
    """A batch of mixed lengths, half as many samples as the largest one."""
    there = np.flatnonzero(lengths > 0)
    count = max(1, most_samples // 2)
    return np.random.default_rng([seed, 3]).choice(there, count, replace=count > len(there))


def shapes(lengths: IntArray, *, most_samples: int, seed: int) -> Iterator[IntArray]:
    """Rows of batches without end: from one sample to `most_samples`, short, long and mixed lengths by turns."""
    rng = np.random.default_rng(seed)
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    number = 0
    while True:
        # The middle of what is to come is measured first: a first batch of full size compiles for all others.
        share = ((number * 5 + 7) % 8 + 1) / 8
        count = max(1, round(most_samples**share)) if number % 3 else max(1, round(most_samples * share))
        if number % 2:
            rows = rng.choice(order, count, replace=count > len(order))
        else:
            width = max(count, len(order) // 6)
            start = int(rng.integers(0, max(1, len(order) - width + 1)))
            rows = rng.choice(order[start : start + width], count, replace=count > width)
        yield np.asarray(rows, dtype=np.int64)
        number += 1
