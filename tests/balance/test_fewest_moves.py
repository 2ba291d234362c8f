"""Moving as few samples as possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance.fewest_moves import min_moves
from freescale.errors import PlanError


def imbalance(
    costs: np.ndarray, owner: np.ndarray, num_ranks: int, speeds: np.ndarray | None = None
) -> float:
    loads = np.bincount(owner, weights=costs, minlength=num_ranks)
    speeds = np.ones(num_ranks) if speeds is None else speeds
    return float((loads / speeds).max() / (loads.sum() / speeds.sum())) if loads.sum() > 1e-100 else 1.0


@given(st.data())
def test_it_never_gets_worse_and_only_names_ranks(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 5))
    costs = np.array(data.draw(st.lists(st.floats(0, 1e4), max_size=40)))
    owner = np.array([data.draw(st.integers(0, num_ranks - 1)) for _ in costs], dtype=np.int64)
    new = min_moves(costs, owner, num_ranks)
    assert new.shape == owner.shape
    assert ((new >= 0) & (new < num_ranks)).all()
    assert imbalance(costs, new, num_ranks) <= imbalance(costs, owner, num_ranks) * (1 + 1e-9)


def test_long_tails_become_even_with_few_moves() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(6.2, 1.0, 32 * 32), 8192)
    costs = lengths + lengths**2 / 2048
    owner = np.repeat(np.arange(32), 32)
    new = min_moves(costs, owner, 32)
    assert imbalance(costs, owner, 32) > 1.5
    assert imbalance(costs, new, 32) < 1.011
    assert (new != owner).mean() < 0.2


def test_a_slow_rank_gives_work_away() -> None:
    costs, owner = np.ones(100), np.repeat([0, 1], 50)
    new = min_moves(costs, owner, 2, speeds=[1.0, 0.5])
    assert (new == 1).sum() in (33, 34)


def test_balanced_samples_stay_where_they_are() -> None:
    owner = np.repeat(np.arange(4), 5)
    assert (min_moves(np.ones(20), owner, 4) == owner).all()


@pytest.mark.parametrize(
    ("costs", "owner", "num_ranks"),
    [([1.0], [0, 1], 2), ([np.nan], [0], 2), ([-1.0], [0], 1), ([1.0], [3], 2), ([], [], 0)],
)
def test_bad_input_is_one_sentence(costs: list[float], owner: list[int], num_ranks: int) -> None:
    with pytest.raises(PlanError):
        min_moves(costs, owner, num_ranks)
