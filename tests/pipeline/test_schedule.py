"""Whole runs down both paths: the same losses, evaluations, parameters and optimizer state, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ranks import run_on_ranks
from tests.small_run import train_small

# Dropout, clipping, micro-batches and a schedule are on: none of them may notice the path.
RECIPE = (
    "run.steps=48",
    "run.eval_every=16",
    "run.checkpoint_every=11",
    "model.dropout=0.2",
    "optim.schedule=cosine",
    "optim.warmup_steps=9",
    "optim.clip_norm=1.0",
    "optim.accumulate=2",
    "pipeline.check=true",
    "pipeline.decide_every=null",
    "balance.refit_every=null",
)
VARIANTS = {
    "adam": ("embedding.optimizer=adam",),
    "adagrad, loader process": ("embedding.optimizer=rowwise_adagrad", "data.workers=1"),
    "sgd, one micro-batch": ("embedding.optimizer=sgd", "embedding.lr=0.1", "optim.accumulate=1"),
    "bfloat16 table, tiny chunks": ("embedding.dtype=bfloat16", "pipeline.chunk_mb=0.001"),
}


def both_paths(rank: int, recipe: tuple[str, ...], folder: str) -> list[dict[str, Any]]:
    return [
        train_small((*recipe, f"pipeline.prioritized={way}"), f"{folder}/{way}") for way in ("false", "true")
    ]


def assert_same_bits(plain: dict[str, Any], ours: dict[str, Any], first_step: int = 0) -> None:
    assert ours["losses"] == plain["losses"][first_step:]
    for name, values in plain["tensors"].items():
        np.testing.assert_array_equal(ours["tensors"][name], values, err_msg=name)
    quality = [{k: v for k, v in event.items() if "@" in k} for event in plain["evals"]]
    assert [{k: v for k, v in e.items() if "@" in k} for e in ours["evals"]] == quality[-len(ours["evals"]) :]


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_run_has_the_bits_of_the_plain_run(variant, tmp_path):
    for plain, ours in run_on_ranks(both_paths, 2, (*RECIPE, *VARIANTS[variant]), str(tmp_path), timeout=100):
        assert_same_bits(plain, ours)
