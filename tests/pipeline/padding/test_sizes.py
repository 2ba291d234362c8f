"""Sizes foreseen from the plan: few, as cheap as they can be, the same for everybody who asks, and enough for a run."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance import BalancedSampler
from freescale.pipeline import PaddingSizes, RowCounts, foresee_sizes, padded_size
from freescale.pipeline.padding.sizes import _PRICE, choose_sizes

TABLE_ROWS = 5000


def rows_of(plan):
    return RowCounts({"item": len(plan.rows)})


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=12))
def test_no_other_sizes_cost_less(tokens):
    needed = [padded_size(num) for num in tokens]

    def cost(sizes):
        places = sum(min(size for size in sizes if size >= num) for num in needed)
        return places + len(sizes) * sum(needed) / _PRICE

    *smaller, largest = sorted(set(needed))
    others = [(*few, largest) for count in range(len(smaller) + 1) for few in combinations(smaller, count)]
    assert cost(choose_sizes(tokens)) == pytest.approx(min(cost(sizes) for sizes in others))


@given(st.lists(st.integers(1, 10**5), min_size=1, max_size=6, unique=True), st.integers(0, 10**6))
def test_a_batch_takes_the_smallest_size_that_holds_it(sizes, num):
    chosen = PaddingSizes(tokens=tuple(sorted(sizes)), samples=40, rows={"item": 300})
    holding = [size for size in sizes if size >= num]
    assert chosen.tokens_for(num) == (min(holding) if holding else padded_size(num, steps=4))
    assert chosen.samples_for(num) >= num
    assert chosen.rows_for("item", min(num, TABLE_ROWS), table_rows=TABLE_ROWS) > min(num, TABLE_ROWS)


def test_without_foresight_sizes_lie_a_sixteenth_apart():
    assert PaddingSizes().tokens_for(9000) == padded_size(9000)
    assert PaddingSizes().samples_for(90) == padded_size(90, fewest=8)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_nearly_every_batch_of_a_long_run_has_a_size_that_was_foreseen(num_ranks):
    lengths = np.clip(6 * (1 + np.random.default_rng(5).pareto(1.3, 6000)), 2, 900).astype(np.int64)
    for rank in range(num_ranks):
        asked = []
        sampler = BalancedSampler(lengths, global_batch=192, num_ranks=num_ranks, rank=rank, seed=3)
        sizes = foresee_sizes(
            sampler,
            rows_of=lambda plan, asked=asked: asked.append(plan) or rows_of(plan),
            table_rows={"item": TABLE_ROWS},
        )
        assert len(asked) == 1, "one batch is read, no more"
        assert 2 <= len(sizes.tokens) <= 10
        again = BalancedSampler(lengths, global_batch=192, num_ranks=num_ranks, rank=rank, seed=3)
        assert foresee_sizes(again, rows_of=rows_of, table_rows={"item": TABLE_ROWS}) == sizes
        places, tokens, foreseen, steps = 0, 0, 0, 120
        for plan in sampler.plans(0, steps):
            num = int(lengths[plan.rows].sum())
            size = sizes.tokens_for(num)
            foreseen += sizes.holds(tokens=size, samples=sizes.samples_for(len(plan.rows)), rows=sizes.rows)
            places, tokens = places + size, tokens + num
        assert foreseen >= 0.98 * steps
        assert places < 1.12 * tokens
