"""Experts follow the one curve: spread over ranks or not, balanced, prioritized, accumulated, killed and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.effort import slow
from tests.test_one_curve import assert_same_curve, on_ranks

# Everything a router can do, and clipping, which must see the experts of all ranks. With 4 ranks one holds no expert.
MOE = (
    "model.dtype=float64",
    "model.layers=2",
    "model.dropout=0.2",
    "ffn.kind=moe",
    "ffn.hidden=16",
    "moe.experts=6",
    "moe.top_k=2",
    "moe.shared=1",
    "moe.bias_rate=0.1",
    "moe.aux_loss=0.05",
    "moe.z_loss=0.01",
    "optim.clip_norm=0.1",
    "run.keep=10",
)


@pytest.fixture(scope="module", params=[5, slow(10)])
def third(request: pytest.FixtureRequest) -> int:
    """A third of the steps."""
    return request.param


@pytest.fixture(scope="module")
def recipe(third: int) -> tuple[str, ...]:
    return (*MOE, f"run.steps={3 * third}", f"run.eval_every={third}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, recipe: tuple[str, ...]) -> dict[str, Any]:
    return on_ranks(1, recipe, str(tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        slow(4, ("moe.parallel=true",)),  # the first steps: below
        slow(2, ("moe.parallel=true", "optim.accumulate=3", "balance.enabled=false", "moe.save=input")),
        (2, ("moe.parallel=false", "pipeline.prioritized=false", "moe.backend=reference")),
    ],
    ids=["4 ranks", "accumulated, not balanced", "not spread, plain pipeline"],
)
def test_ranks_and_speed_features_keep_the_curve(
    num_ranks: int,
    changes: tuple[str, ...],
    tmp_path: Path,
    recipe: tuple[str, ...],
    alone: dict[str, Any],
) -> None:
    assert_same_curve(on_ranks(num_ranks, (*recipe, *changes), str(tmp_path)), alone)


def test_routers_learn_and_move_in_that_run(alone: dict[str, Any]) -> None:
    """Or the tests above would show nothing."""
    routers = [name for name in alone["tensors"] if name.endswith("router.bias")]
    assert len(routers) == 2
    for name in routers:
        assert np.abs(alone["tensors"][name]).max() > 1e-3
    assert np.mean(alone["losses"][-5:]) < 0.8 * np.mean(alone["losses"][:5])


def test_a_checkpoint_of_four_ranks_goes_on_with_two_and_one(
    tmp_path: Path, third: int, alone: dict[str, Any]
) -> None:
    """Experts, their optimizer state and biases find their new homes."""
    for first, num_ranks in zip(range(0, 3 * third, third), (4, 2, 1), strict=True):
        until = first + third
        recipe = (*MOE, f"run.steps={until}", f"run.eval_every={third}", "moe.parallel=true")
        path = tmp_path / "checkpoints" / f"step-{first:08d}" if first else None
        result = on_ranks(num_ranks, recipe, str(tmp_path), path)
        np.testing.assert_allclose(result["losses"], alone["losses"][first:until], rtol=1e-9)
    for name, value in alone["tensors"].items():
        np.testing.assert_allclose(result["tensors"][name], value, rtol=0, atol=1e-8, err_msg=name)
