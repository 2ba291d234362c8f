"""One training step taken apart: each of its parts is run by itself and timed, with the project's own parts."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from freescale.comm.world import Ranks
from freescale.data import BatchFeatures, IntArray, SequenceBatch
from freescale.embedding import Lookup, as_compute
from freescale.kernels.rows import unique
from freescale.kernels.runtime import PostponedGradients
from freescale.model import dropout_keys
from freescale.pipeline import TABLE, find_rows
from freescale.profiling.stopwatch import Stopwatch
from freescale.recipe import (
    Config,
    build_examples,
    build_features,
    build_model,
    build_optimizer,
    build_source,
    build_tables,
    room_to_postpone,
)
from freescale.sim import BY_LAYER
from freescale.train import by_layer, update_only


class StepMeter:
    """The parts of a recipe on one device, and how long each of them takes in a step.

    Args:
        config: the recipe.
        device: where it trains.

    Attributes:
        num_rows: rows that steps have looked up so far.
        num_row_bytes: of all of them, as they travel.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._device = config, device
        source = build_source(config)
        ranks = Ranks(rank=0, num_ranks=1, device=device)
        self.features: BatchFeatures | None = build_features(config, source)
        self.model = build_model(config, source, features=self.features).to(device)
        negatives = self.model.head.needs.negatives
        self.examples = build_examples(config, source, "train", negatives=negatives)
        self._tables = build_tables(config, source, ranks, self.features)
        self.embedding = self._tables.embedding
        self._optimizer = build_optimizer(config, self.model, device)
        self._layers = by_layer(self.model)
        self._watch = Stopwatch(device)
        self._later = PostponedGradients(most_bytes=room_to_postpone(config, device))  # as much as in a run
        # As in training: a CPU multiplies in float32 all the same.
        halves = config.model.dtype == "bfloat16" and device.type == "cuda"
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=halves)
        self.num_rows = self.num_row_bytes = 0

    @property
    def num_postponed(self) -> int:
        """Weight gradients that waited, since memory last ran out."""
        return self._later.num_postponed

    @property
    def num_without_room(self) -> int:
        """Others that would have."""
        return self._later.num_without_room

    def step(self, rows: IntArray, step: int) -> dict[str, float]:
        """Train on a batch: milliseconds of each part, and how many rows and ids there were."""
        ms: dict[str, float] = {}
        lookups, batch = self._looked_up(rows, step, ms)
        self._forward_and_backward(lookups, batch, step, ms)
        self._updates(lookups, step, ms)
        return ms

    def weight_gradients(self, rows: IntArray, step: int) -> float:
        """Milliseconds of what a split backward puts off; less of it where memory runs out."""
        while True:
            try:
                return self._postponed(rows, step)
            except torch.OutOfMemoryError:
                self._later.forget()
                if not self._later.keep_less():
                    raise

    def _looked_up(
        self, rows: IntArray, step: int, ms: dict[str, float]
    ) -> tuple[dict[str, Lookup], SequenceBatch]:
        watch = self._watch
        batch = watch.run(lambda: self.examples.batch(rows, step=step))
        ms["host"] = watch.ms
        lookups, indexed = watch.run(lambda: self._look_up_all(batch, step))
        whole = watch.ms
        asked = {name: lookup.unique[lookup.inverse].flatten() for name, lookup in lookups.items()}
        watch.run(lambda: [unique(ids) for ids in asked.values()])
        ms["find"] = watch.ms
        tables = self.embedding.tables
        watch.run(lambda: [tables[name].gather(each.unique) for name, each in lookups.items()])
        ms["gather"] = watch.ms
        ms["host"] += max(0.0, whole - ms["find"] - ms["gather"])
        ms["asked"] = float(sum(map(len, asked.values())))
        return lookups, indexed

    def _forward_and_backward(
        self, lookups: dict[str, Lookup], batch: SequenceBatch, step: int, ms: dict[str, float]
    ) -> None:
        watch = self._watch
        self._optimizer.zero_grad(set_to_none=True)
        with self._autocast, dropout_keys(seed=self._config.run.seed, step=step):
            loss = watch.run(lambda: self._forward(lookups, batch) / max(1, batch.num_tokens))
        ms["forward"] = watch.ms
        watch.run(loss.backward)
        ms["backward"] = watch.ms

    def _updates(self, lookups: dict[str, Lookup], step: int, ms: dict[str, float]) -> None:
        watch, optimizer = self._watch, self._optimizer
        watch.run(optimizer.step)
        ms["optimizer"] = watch.ms
        gradients = [
            {param: param.grad for param in params if param.grad is not None} for params in self._layers
        ]
        # As beside the next forward, where each layer is updated when its turn comes: small updates fill few SMs.
        watch.run(lambda: [update_only(optimizer, each) for each in gradients])
        ms[BY_LAYER] = watch.ms
        updated, lr = list(lookups.values()), self._config.embedding.lr
        watch.run(lambda: self.embedding.update_all(updated, lr=lr, step=step + 1))
        ms["update"] = watch.ms
        counts = {name: len(lookup.unique) for name, lookup in lookups.items()}
        ms["rows"] = float(sum(counts.values()))
        widths = {name: plan.spec.dim for name, plan in self.embedding.plans.items()}
        self.num_rows += sum(counts.values())
        self.num_row_bytes += sum(4 * widths[name] * count for name, count in counts.items())

    def _postponed(self, rows: IntArray, step: int) -> float:
        lookups, indexed = self._look_up_all(self.examples.batch(rows, step=step), step)
        self._optimizer.zero_grad(set_to_none=True)
        with self._later.taking(), torch.autograd.set_multithreading_enabled(False):
            with self._autocast, dropout_keys(seed=self._config.run.seed, step=step):
                loss = self._forward(lookups, indexed) / max(1, indexed.num_tokens)
            loss.backward()
        self._watch.run(self._later.compute)
        return self._watch.ms

    def _look_up_all(self, batch: SequenceBatch, step: int) -> tuple[dict[str, Lookup], SequenceBatch]:
        tables = self._tables
        asked, indexed = find_rows(
            batch, self.embedding, tables.id_map, self._device, step=step, features=tables.features
        )
        return self.embedding.lookups(asked), indexed

    def _forward(self, lookups: dict[str, Lookup], batch: SequenceBatch) -> Tensor:
        rows = {name: lookup.rows for name, lookup in lookups.items()}
        if self.features is None:
            return cast(Tensor, self.model(rows[TABLE], batch))
        assert self.model.items is not None
        compute = as_compute(self.model.items(batch.items, rows))
        return cast(Tensor, self.model(compute, batch, None, rows))
