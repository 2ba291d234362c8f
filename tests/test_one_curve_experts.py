"""Experts follow the one curve: spread over ranks or not, balanced, prioritized, accumulated, killed and resumed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.test_one_curve import assert_same_curve, on_ranks

MOE = (
    "model.dtype=float64",
    "model.layers=2",
    "run.steps=60",
    "run.eval_every=30",
    "ffn.kind=moe",
    "ffn.hidden=16",
    "moe.experts=6",
    "moe.top_k=2",
    "moe.shared=1",
    "moe.bias_rate=0.01",
    "moe.aux_loss=0.05",
    "moe.z_loss=0.01",
    "optim.clip_norm=0.1",
)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return on_ranks(1, MOE)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_experts_spread_over_ranks_keep_the_curve(num_ranks: int, alone: dict[str, Any]) -> None:
    assert_same_curve(on_ranks(num_ranks, (*MOE, "moe.parallel=true")), alone)


@pytest.mark.parametrize(
    "change",
    [
        "moe.parallel=false",
        "balance.enabled=false",
        "optim.accumulate=3",
        "pipeline.prioritized=false",
        "moe.backend=reference",
    ],
)
def test_speed_features_keep_the_curve(change: str, alone: dict[str, Any]) -> None:
    assert_same_curve(on_ranks(2, (*MOE, "moe.parallel=true", change)), alone)
