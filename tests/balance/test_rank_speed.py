"""Ranks of different speed: what is fixed in a step is slow on a slow rank, too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance import CostModel
from freescale.balance.partition import partition
from freescale.balance.rank_speed import LEAST_WORK, speeds_of_work
from freescale.balance.sampler import BalancedSampler


def test_work_is_what_is_left_of_a_rank_after_what_is_fixed():
    speeds = speeds_of_work(np.array([1.0, 1.0, 1.0, 0.5]), fixed=1.0, costs=np.full(24, 1.0))
    assert speeds is not None
    # All finish after 8: three have 7 to compute, the slow one 8 * 0.5 - 1 = 3.
    np.testing.assert_allclose(24 * speeds / speeds.sum(), [7, 7, 7, 3])


@given(
    speeds=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8),
    share=st.floats(0.01, 0.3),
    seed=st.integers(0, 99),
)
def test_ranks_finish_together(speeds, share, seed):
    costs = np.random.default_rng(seed).uniform(0.5, 1.5, 400 * len(speeds))
    given_speeds = np.array(speeds)
    fixed = share * costs.sum() / len(speeds)
    at = speeds_of_work(given_speeds, fixed=fixed, costs=costs)
    work = np.array([costs[rows].sum() for rows in partition(costs, len(speeds), speeds=at)])
    finish = (fixed + work) / given_speeds
    assert finish.max() / finish.mean() < 1.02


@given(speeds=st.lists(st.floats(0.4, 2.0), min_size=1, max_size=8), fixed=st.floats(0, 1e6))
def test_every_rank_keeps_some_work_and_none_gets_faster_than_another(speeds, fixed):
    before = np.array(speeds)
    after = speeds_of_work(before, fixed=fixed, costs=np.ones(1))
    assert after is not None
    assert (after >= LEAST_WORK * before * (1 - 1e-12)).all()
    assert (after <= before).all()
    assert (np.diff(after[np.argsort(before)]) >= 0).all()


@pytest.mark.parametrize("fixed", [0.0, 5.0])
def test_equal_ranks_have_no_speeds(fixed):
    assert speeds_of_work(None, fixed=fixed, costs=np.ones(3)) is None


def test_the_sampler_plans_so():
    """Two ranks, one half as fast; 40 samples of a millisecond, and 10 ms that a step takes besides."""
    lengths = np.full(400, 100)
    model = CostModel(fixed_ms=10.0, per_sample_ms=1.0, per_token_ms=0.0, per_square_ms=0.0)
    counts = [
        len(
            BalancedSampler(
                lengths,
                global_batch=40,
                rank=rank,
                num_ranks=2,
                cost_model=model,
                speeds=[1.0, 0.5],
                max_tokens_ratio=None,
            )
            .plan(0)
            .rows
        )
        for rank in range(2)
    ]
    # Both finish after (40 + 2 * 10) / 1.5 = 40 ms: 30 samples and 10 ms, 10 samples and 10 ms at half the speed.
    assert counts == [30, 10]
