"""Global batches: every sample once an epoch, the same for any number of ranks, kind to files when asked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance import GlobalBatches
from freescale.errors import DataError, PlanError
from tests.effort import examples


def epoch_rows(batches: GlobalBatches, epoch: int) -> list[np.ndarray]:
    return [batches.batch(step) for step in range(batches.first_step(epoch), batches.first_step(epoch + 1))]


@st.composite
def recipes(draw):
    lengths = draw(st.lists(st.integers(0, 300), min_size=1, max_size=120))
    recipe = {"seed": draw(st.integers(0, 2**40)), "window": draw(st.sampled_from([1, 2, 4, 16]))}
    if draw(st.booleans()):
        recipe["global_batch"] = draw(st.integers(1, 40))
    else:
        recipe["global_tokens"] = draw(st.integers(1, 2000))
    if draw(st.booleans()):
        cut = draw(st.integers(0, len(lengths)))
        recipe["groups"] = [cut, len(lengths) - cut]
        recipe["shuffle_rows"] = draw(st.integers(1, 150))
    if draw(st.booleans()):
        recipe["window_ranks"] = draw(st.integers(1, 64))
    return lengths, recipe


@examples(67, thorough=200)
@given(recipes())
def test_every_sample_exactly_once_an_epoch_whatever_the_recipe(case):
    lengths, recipe = case
    batches = GlobalBatches(lengths, **recipe)
    for epoch in (0, 1, 3):
        steps = epoch_rows(batches, epoch)
        assert len(steps) == batches.steps_in_epoch(epoch)
        assert all(len(step) > 0 for step in steps)
        assert sorted(np.concatenate(steps).tolist()) == list(range(len(lengths)))


@examples(33, thorough=200)
@given(recipes())
def test_a_step_is_a_pure_function_of_seed_and_data(case):
    lengths, recipe = case
    forwards, backwards = GlobalBatches(lengths, **recipe), GlobalBatches(lengths, **recipe)
    steps = range(12)
    seen = {step: forwards.batch(step) for step in steps}
    for step in reversed(steps):
        np.testing.assert_array_equal(backwards.batch(step), seen[step])
        assert backwards.locate(step) == forwards.locate(step)
    assert forwards.recipe() == backwards.recipe()


@examples(33, thorough=200)
@given(recipes())
def test_drop_last_leaves_out_only_the_incomplete_batch(case):
    lengths, recipe = case
    kept = GlobalBatches(lengths, **{**recipe, "window": 1})
    try:
        dropped = GlobalBatches(lengths, **{**recipe, "window": 1}, drop_last=True)
    except PlanError:
        assert kept.steps_in_epoch(0) == 1
        return
    whole, cut = epoch_rows(kept, 0), epoch_rows(dropped, 0)
    assert len(whole) - len(cut) in (0, 1)
    for one, other in zip(whole, cut):
        np.testing.assert_array_equal(one, other)
    if kept.global_batch is not None:
        assert all(len(step) == kept.global_batch for step in cut)


@examples(33, thorough=200)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=200), st.integers(1, 2000), st.sampled_from([1, 4, 16])
)
def test_a_token_budget_holds_as_many_samples_as_fit(lengths, budget, window):
    batches = GlobalBatches(lengths, global_tokens=budget, window=window)
    sizes = np.asarray(lengths)
    steps = epoch_rows(batches, 0)
    for step in steps:
        assert sizes[step].sum() <= budget or len(step) == 1
    if window == 1:
        for step, following in itertools.pairwise(steps):
            assert sizes[step].sum() + sizes[following[0]] > budget


def test_epochs_and_seeds_differ_and_any_order_is_possible():
    lengths = np.ones(1000, dtype=np.int64)
    batches = GlobalBatches(lengths, global_batch=100, seed=3)
    first, second = np.concatenate(epoch_rows(batches, 0)), np.concatenate(epoch_rows(batches, 1))
    other = np.concatenate(epoch_rows(GlobalBatches(lengths, global_batch=100, seed=4), 0))
    assert (first != second).mean() > 0.9
    assert (first != other).mean() > 0.9
    assert abs(np.corrcoef(np.arange(1000), first)[0, 1]) < 0.15


def test_the_order_is_the_one_it_always_was():
    batches = GlobalBatches(np.ones(20, dtype=np.int64), global_batch=10, seed=7)
    assert batches.batch(0).tolist() == ORDER_OF_SEED_7


def test_streaming_order_touches_few_groups_at_a_time():
    groups = [100] * 50
    batches = GlobalBatches(
        np.ones(5000, dtype=np.int64), global_batch=100, groups=groups, shuffle_rows=400, seed=1
    )
    steps = epoch_rows(batches, 0)
    for start in range(0, len(steps) - 4):
        touched = {int(row) // 100 for step in steps[start : start + 4] for row in step}
        assert len(touched) <= 10
    assert len({int(row) // 100 for row in steps[0]}) == 4
    full = GlobalBatches(np.ones(5000, dtype=np.int64), global_batch=100, groups=groups, shuffle_rows=5000)
    assert len({int(row) // 100 for row in full.batch(0)}) > 30


def test_a_window_lets_giants_meet_and_tells_what_it_costs():
    lengths = np.exp(np.random.default_rng(0).normal(np.log(512), 1.0, 256 * 8 * 16))
    lengths = np.minimum(lengths, 8192).astype(np.int64)

    def bubble(batches: GlobalBatches) -> float:
        fair = worst = 0.0
        for rows in epoch_rows(batches, 0):
            costs = lengths[rows] + lengths[rows] ** 2 / 2048
            fair += costs.sum() / 256
            worst += max(costs.sum() / 256, costs.max())
        return 1 - fair / worst

    plain = GlobalBatches(lengths, global_batch=2048)
    windowed = GlobalBatches(lengths, global_batch=2048, window=16)
    assert windowed.window_ranks == 256
    assert bubble(plain) > 0.6
    assert bubble(windowed) < 0.01
    loose, tight = plain.mixing(num_steps=16), windowed.mixing(num_steps=16)
    assert loose.sorted_share < 0.01 < 0.3 < tight.sorted_share <= 1
    assert loose.fewest == loose.most == 1.0
    assert 0.05 < tight.fewest < 1 < tight.most <= 2


def test_window_steps_hold_the_samples_of_the_same_steps_without_window():
    lengths = np.random.default_rng(1).integers(1, 1000, 640)
    plain = GlobalBatches(lengths, global_batch=32, seed=5)
    windowed = GlobalBatches(lengths, global_batch=32, seed=5, window=4)
    for first in range(0, 20, 4):
        one = np.concatenate([plain.batch(step) for step in range(first, first + 4)])
        other = np.concatenate([windowed.batch(step) for step in range(first, first + 4)])
        assert sorted(one.tolist()) == sorted(other.tolist())


def test_batches_handed_out_are_copies():
    batches = GlobalBatches([1, 2, 3, 4], global_batch=2)
    batch = batches.batch(0)
    before = batch.tolist()
    batch[:] = -1
    assert batches.batch(0).tolist() == before


def test_only_two_epochs_stay_in_memory():
    batches = GlobalBatches(np.ones(100, dtype=np.int64), global_tokens=10)
    for step in range(60):
        batches.batch(step)
    assert len(batches._epochs) <= 2


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({}, "either by samples or by tokens"),
        ({"global_batch": 4, "global_tokens": 4}, "either by samples or by tokens"),
        ({"global_batch": 0}, "global_batch must be at least 1"),
        ({"global_tokens": -5}, "global_tokens must be at least 1"),
        ({"global_batch": 4, "window": 0}, "window must be at least 1"),
        ({"global_batch": 4, "window_ranks": 0}, "window_ranks must be at least 1"),
        ({"global_batch": 4, "shuffle_rows": 0}, "shuffle_rows must be at least 1"),
        ({"global_batch": 4, "seed": -1}, "seed must not be negative"),
        ({"global_batch": 4, "groups": [3, 3]}, "add up"),
        ({"global_batch": 40, "drop_last": True}, "no complete global batch"),
        ({"global_tokens": 40, "drop_last": True}, "no complete global batch"),
    ],
)
def test_bad_recipes_are_refused(recipe, message):
    with pytest.raises(PlanError, match=message):
        GlobalBatches([1, 2, 3, 4, 5], **recipe)


@pytest.mark.parametrize("lengths", [[], [[1, 2]], [1, -1], [1.5, 2.0]])
def test_bad_lengths_are_refused(lengths):
    with pytest.raises(DataError, match="Lengths"):
        GlobalBatches(lengths, global_batch=2)


def test_steps_and_epochs_count_from_zero():
    batches = GlobalBatches([1, 2, 3], global_batch=2)
    with pytest.raises(PlanError):
        batches.batch(-1)
    with pytest.raises(PlanError):
        batches.first_step(-1)


ORDER_OF_SEED_7 = [15, 13, 8, 12, 4, 14, 3, 6, 2, 1]
