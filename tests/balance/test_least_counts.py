"""Ranks with at least so many samples: counts are kept, nothing moves without need, and the sampler passes it on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance import BalancedSampler, min_moves
from freescale.balance.least_counts import with_least_counts


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 9)), max_size=30), st.integers(0, 4))
def test_counts_are_kept_where_there_are_enough_samples(samples, least):
    owner = np.array([rank for rank, _ in samples], dtype=np.int64)
    costs = np.array([cost for _, cost in samples])
    new = with_least_counts(owner, costs, 4, least=least)
    before, after = np.bincount(owner, minlength=4), np.bincount(new, minlength=4)
    assert after.min() >= min(least, len(owner) // 4)
    if before.min() >= least:
        assert np.array_equal(owner, new)
    assert after.sum() == len(owner)


def test_a_stream_leaves_no_rank_without_samples():
    costs, owner = np.array([100.0, 0.0, 0.0]), np.array([0, 1, 1])
    assert np.bincount(min_moves(costs, owner, 3), minlength=3).min() == 0
    assert np.bincount(min_moves(costs, owner, 3, min_count=1), minlength=3).tolist() == [1, 1, 1]


class AllToTheFirst:
    """A balancer that nobody should use."""

    def assign(self, costs, num_ranks, *, tokens, max_tokens, speeds):
        return [np.arange(len(costs)), *[np.zeros(0, dtype=np.int64)] * (num_ranks - 1)]


@pytest.mark.parametrize("balancer", [None, AllToTheFirst()], ids=["ours", "another"])
def test_a_sampler_leaves_no_rank_without_samples(balancer):
    samplers = [
        BalancedSampler(
            [9, 1, 1, 1, 1] * 4, global_batch=5, num_ranks=4, rank=rank, balancer=balancer, min_count=1
        )
        for rank in range(4)
    ]
    for step in range(4):
        plans = [sampler.plan(step) for sampler in samplers]
        assert len({plan.plan_hash for plan in plans}) == 1
        assert min(len(plan.rows) for plan in plans) == 1
        assert sum(len(plan.rows) for plan in plans) == 5
