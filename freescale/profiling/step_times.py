"""How long the parts of a training step take, over batches of many sizes and lengths, with the project's own parts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from freescale.balance import MeasuredStep
from freescale.comm.world import Ranks
from freescale.data import BatchFeatures, IntArray, SequenceBatch
from freescale.embedding import Lookup, ShardedEmbedding, as_compute
from freescale.kernels.rows import unique
from freescale.kernels.runtime import PostponedGradients
from freescale.model import dropout_keys
from freescale.pipeline import TABLE, find_rows
from freescale.profiling.stopwatch import Stopwatch
from freescale.recipe import (
    Config,
    asked_ids,
    build_examples,
    build_features,
    build_model,
    build_optimizer,
    build_source,
    build_tables,
    room_to_postpone,
)
from freescale.sim import BY_LAYER, TableLoad, write_tables
from freescale.train import by_layer, update_only

PARTS = ("forward", "backward", "weights", "optimizer", BY_LAYER, "find", "gather", "update", "host")
# Fewer shapes than this cannot tell fixed, linear and quadratic cost apart and leave some to test on.
FEWEST_SHAPES = 20
_REPEATS = 3
_LEAST_KEPT_BYTES = 1 << 26
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
    source = build_source(config)
    ranks = Ranks(rank=0, num_ranks=1, device=device)
    features = build_features(config, source)
    model = build_model(config, source, features=features).to(device)
    examples = build_examples(config, source, "train", negatives=model.head.needs.negatives)
    tables = build_tables(config, source, ranks, features)
    embedding, id_map = tables.embedding, tables.id_map
    optimizer = build_optimizer(config, model, device)
    layers = by_layer(model)
    watch = Stopwatch(device)
    found = StepTimes(
        dense_parameters=sum(each.numel() for each in model.parameters()),
        row_bytes=config.model.dim * 4,
    )
    if features is not None:
        found.tables = write_tables(table_loads(config, features, embedding))
    most_bytes = room_to_postpone(config, device)  # as much as a run lets them keep
    widths = {name: plan.spec.dim for name, plan in embedding.plans.items()}
    moved = [0, 0]
    # As in training: a CPU multiplies in float32 all the same.
    halves = config.model.dtype == "bfloat16" and device.type == "cuda"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=halves)

    def look_up_all(batch: SequenceBatch, step: int) -> tuple[dict[str, Lookup], SequenceBatch]:
        asked, indexed = find_rows(batch, embedding, id_map, device, step=step, features=tables.features)
        return embedding.lookups(asked), indexed

    def forward(lookups: dict[str, Lookup], batch: SequenceBatch) -> Tensor:
        rows = {name: lookup.rows for name, lookup in lookups.items()}
        if features is None:
            return cast(Tensor, model(rows[TABLE], batch))
        assert model.items is not None
        return cast(Tensor, model(as_compute(model.items(batch.items, rows)), batch, None, rows))

    def once(rows: IntArray, step: int) -> dict[str, float]:
        ms: dict[str, float] = {}
        batch = watch.run(lambda: examples.batch(rows, step=step))
        ms["host"] = watch.ms
        lookups, indexed = watch.run(lambda: look_up_all(batch, step))
        whole = watch.ms
        asked = {name: lookup.unique[lookup.inverse].flatten() for name, lookup in lookups.items()}
        watch.run(lambda: [unique(ids) for ids in asked.values()])
        ms["find"] = watch.ms
        watch.run(lambda: [embedding.tables[name].gather(each.unique) for name, each in lookups.items()])
        ms["gather"] = watch.ms
        ms["host"] += max(0.0, whole - ms["find"] - ms["gather"])
        optimizer.zero_grad(set_to_none=True)
        with autocast, dropout_keys(seed=config.run.seed, step=step):
            loss = watch.run(lambda: forward(lookups, indexed) / max(1, batch.num_tokens))
        ms["forward"] = watch.ms
        watch.run(loss.backward)
        ms["backward"] = watch.ms
        watch.run(optimizer.step)
        ms["optimizer"] = watch.ms
        gradients = [{param: param.grad for param in params if param.grad is not None} for params in layers]
        # As beside the next forward, where each layer is updated when its turn comes: small updates fill few SMs.
        watch.run(lambda: [update_only(optimizer, each) for each in gradients])
        ms[BY_LAYER] = watch.ms
        updated = list(lookups.values())
        watch.run(lambda: embedding.update_all(updated, lr=config.embedding.lr, step=step + 1))
        ms["update"] = watch.ms
        counts = {name: len(lookup.unique) for name, lookup in lookups.items()}
        ms["rows"], ms["asked"] = float(sum(counts.values())), float(sum(map(len, asked.values())))
        moved[0] += sum(counts.values())
        moved[1] += sum(4 * widths[name] * count for name, count in counts.items())
        return ms

    def weight_gradients(rows: IntArray, step: int) -> float:
        """Milliseconds of what a split backward puts off; less of it where memory runs out."""
        nonlocal most_bytes
        while True:
            try:
                return postponed(rows, step)
            except torch.OutOfMemoryError:
                if not most_bytes:
                    raise
                most_bytes = most_bytes * 3 // 4 if most_bytes > _LEAST_KEPT_BYTES else 0

    def postponed(rows: IntArray, step: int) -> float:
        lookups, indexed = look_up_all(examples.batch(rows, step=step), step)
        optimizer.zero_grad(set_to_none=True)
        later = PostponedGradients(most_bytes=most_bytes)
        with later.taking(), torch.autograd.set_multithreading_enabled(False):
            with autocast, dropout_keys(seed=config.run.seed, step=step):
                loss = forward(lookups, indexed) / max(1, indexed.num_tokens)
            loss.backward()
        found.num_postponed += later.num_postponed
        found.num_without_room += later.num_without_room
        watch.run(later.compute)
        return watch.ms

    began = time.monotonic()
    lengths = examples.lengths()
    for number, rows in enumerate(
        batches or shapes(lengths, most_samples=most_samples, seed=config.run.seed)
    ):
        if number >= FEWEST_SHAPES and time.monotonic() - began > seconds:
            break
        if number < 3:
            once(rows, 0)  # compiles kernels, fills caches
            weight_gradients(rows, 0)
        repeats = [once(rows, number * _REPEATS + turn) for turn in range(_REPEATS)]
        repeats[0]["weights"] = weight_gradients(rows, number * _REPEATS)
        _keep(found, lengths[rows], repeats)
    usual = usual_rows(lengths, most_samples=most_samples, seed=config.run.seed)
    for _ in range(_SAME):
        ms = once(usual, 1)
        found.same.append(
            MeasuredStep.of(lengths[usual].astype(np.float64), ms=ms["forward"] + ms["backward"])
        )
    found.row_bytes = round(moved[1] / moved[0]) if moved[0] else found.row_bytes
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
    found.singles += [MeasuredStep.of(lengths, ms=one["forward"] + one["backward"]) for one in repeats]


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
