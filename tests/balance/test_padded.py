"""Balance for models that pad: the latest rank finishes as early as any assignment lets it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance import BalancedSampler, CostModel
from freescale.balance.balancers.padded import Padded
from tests.effort import examples


def padded_times(parts: list[np.ndarray], costs: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """What a rank that pads needs: as many samples as it has, each at the cost of the longest."""
    return np.array([len(part) * costs[part].max() if len(part) else 0.0 for part in parts]) / speeds


def shared_out(costs: np.ndarray, num_ranks: int, speeds: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    made = Padded().report(costs, num_ranks, tokens=costs.astype(np.int64), max_tokens=None, speeds=speeds)
    assert sorted(np.concatenate(made.ranks).tolist()) == list(range(len(costs)))
    np.testing.assert_allclose(made.times, padded_times(made.ranks, costs, speeds))
    if len(set(speeds)) == 1:
        assert made.counts.min() >= (len(costs) >= num_ranks)
    return made.ranks, made.times


@examples(20, thorough=200)
@given(st.lists(st.integers(0, 50), min_size=0, max_size=7), st.integers(1, 3))
def test_no_assignment_finishes_earlier(costs, num_ranks):
    values, speeds = np.array(costs, dtype=np.float64), np.ones(num_ranks)
    _, times = shared_out(values, num_ranks, speeds)
    best = min(
        padded_times([np.flatnonzero(np.array(owner) == r) for r in range(num_ranks)], values, speeds).max()
        for owner in product(range(num_ranks), repeat=len(costs))
    )
    assert times.max() == pytest.approx(best)


@examples(20, thorough=200)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=200),
    st.lists(st.floats(0.5, 2.0), min_size=1, max_size=9),
)
def test_any_batch_on_ranks_of_any_speeds(costs, speeds):
    values, rates = np.array(costs, dtype=np.float64), np.array(speeds)
    shared_out(values, len(speeds), rates)


def test_where_sums_of_tokens_leave_padded_ranks_idle():
    lengths = np.maximum(1, np.exp(np.random.default_rng(0).normal(6.2, 1.0, 2048))).astype(np.int64)
    costs = CostModel.default().cost(lengths)
    idle, latest = {}, {}
    for name in ("lpt", "padded"):
        samplers = [
            BalancedSampler(lengths, global_batch=256, num_ranks=8, rank=rank, balancer=name)
            for rank in range(8)
        ]
        times = np.array(
            [
                padded_times([each.plan(step).rows for each in samplers], costs, np.ones(8))
                for step in range(8)
            ]
        )
        idle[name] = 1 - times.mean() / times.max(1).mean()
        latest[name] = times.max(1).mean()
    assert idle["lpt"] > 0.3
    assert idle["padded"] < 0.1
    assert latest["padded"] < latest["lpt"] / 4
