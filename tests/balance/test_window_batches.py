"""Steps of a log: old ones stay as they are when windows are appended, and every row is met once a pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance import BalancedSampler, WindowBatches, WindowIndex
from freescale.errors import PlanError
from tests.effort import examples

Sizes = list[int]


def _load(sizes: Sizes):  # type: ignore[no-untyped-def]
    def load(window: int) -> WindowIndex:
        random = np.random.default_rng(window)
        lengths = random.integers(1, 20, sizes[window])
        return WindowIndex(lengths, np.array([sizes[window]]), random.integers(1, lengths + 1))

    return load


@examples(40, 400)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2**40),
)
def test_appending_changes_no_batch_and_every_row_is_met_once_a_pass(
    sizes: Sizes, more: Sizes, global_batch: int, passes: int, window: int, seed: int
) -> None:
    options = {"global_batch": global_batch, "passes": passes, "window": window, "seed": seed}
    short = WindowBatches(sizes, _load(sizes), **options)
    whole = WindowBatches([*sizes, *more], _load([*sizes, *more]), **options)
    grown = WindowBatches(sizes, _load([*sizes, *more]), **options)
    before = [short.batch(step).tolist() for step in range(short.num_steps)]
    grown.extend(more)
    assert grown.num_steps == whole.num_steps
    assert [whole.batch(step).tolist() for step in range(short.num_steps)] == before
    after = [grown.batch(step).tolist() for step in range(grown.num_steps)]
    assert after == [whole.batch(step).tolist() for step in range(whole.num_steps)]
    every = [*sizes, *more]
    for number, size in enumerate(every):
        first, steps = whole.first_step(number), whole.steps_in_epoch(number)
        assert steps == passes * -(-size // global_batch)
        base = sum(every[:number])
        for turn in range(passes):
            part = after[first + turn * steps // passes : first + (turn + 1) * steps // passes]
            assert sorted(row for batch in part for row in batch) == list(range(base, base + size))


def test_windows_and_passes_have_orders_of_their_own() -> None:
    batches = WindowBatches([50, 50], _load([50, 50]), global_batch=50, passes=2, seed=3)
    orders = [(batches.batch(step) % 50).tolist() for step in range(4)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_losses_are_divided_by_targets_and_costs_follow_all_tokens(num_ranks: int) -> None:
    sizes = [7, 9]
    batches = WindowBatches(sizes, _load(sizes), global_batch=4, seed=1)
    for step in range(batches.num_steps):
        plans = [
            BalancedSampler(batches, num_ranks=num_ranks, rank=rank).plan(step) for rank in range(num_ranks)
        ]
        rows = batches.batch(step)
        assert sorted(np.concatenate([plan.rows for plan in plans]).tolist()) == sorted(rows.tolist())
        assert {plan.divisor for plan in plans} == {int(batches.targets_of(rows).sum())}
        assert {plan.global_tokens for plan in plans} == {int(batches.lengths_of(rows).sum())}


def test_steps_beyond_the_log_are_refused() -> None:
    batches = WindowBatches([3], _load([3]), global_batch=2)
    with pytest.raises(PlanError, match="The log has no such step"):
        batches.batch(2)
