"""Negatives: a pure function of (seed, step, row), uniform over the items."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.data.negatives import draw_negatives, mix64

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def slow_mix(x: int) -> int:
    """The splitmix64 finaliser on unbounded integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def slow_negative(seed: int, step: int, row: int, n: int, num_items: int) -> int:
    run = slow_mix((seed * GOLDEN + step) & MASK)
    sample = slow_mix((run + (row + 1) * GOLDEN) & MASK)
    draw = slow_mix((sample + (n + 1) * GOLDEN) & MASK)
    return ((draw >> 32) * num_items) >> 32


def draw(rows, *, num_negatives=5, num_items=1000, seed=1, step=0):
    rows = np.asarray(rows, dtype=np.int64)
    return draw_negatives(rows, num_negatives=num_negatives, num_items=num_items, seed=seed, step=step)


@settings(deadline=None)
@given(st.integers(0, MASK))
def test_mix64_is_the_finaliser_of_splitmix64(x):
    assert int(mix64(np.array([x], np.uint64))[0]) == slow_mix(x)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**40),
    row=st.integers(0, 2**40),
    num_items=st.integers(1, 2**31),
)
def test_every_draw_follows_from_seed_step_row_and_place(seed, step, row, num_items):
    got = draw([row], num_negatives=3, num_items=num_items, seed=seed, step=step)
    assert got.tolist() == [[slow_negative(seed, step, row, n, num_items) for n in range(3)]]


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**9), max_size=20), st.randoms(use_true_random=False))
def test_a_sample_meets_the_same_negatives_in_any_company(rows, random):
    shuffled = random.sample(rows, len(rows))
    together = dict(zip(shuffled, draw(shuffled).tolist()))
    for row in rows:
        assert draw([row]).tolist() == [together[row]]


@pytest.mark.parametrize("other", [{"step": 1}, {"seed": 2}, {"rows": range(100, 200)}])
def test_another_step_seed_or_row_meets_other_negatives(other):
    base = {"rows": range(100), "seed": 1, "step": 0, "num_items": 10**6}
    same = draw(**base) == draw(**(base | other))
    assert same.mean() < 0.01


@pytest.mark.parametrize("num_items", [2, 10, 1000])
def test_items_are_drawn_uniformly(num_items):
    drawn = draw(range(1000), num_negatives=100, num_items=num_items)
    counts = np.bincount(drawn.ravel(), minlength=num_items)
    expected = drawn.size / num_items
    chi2 = ((counts - expected) ** 2 / expected).sum()
    # Mean num_items - 1, standard deviation sqrt(2 (num_items - 1)); six of them is one chance in a billion.
    assert abs(chi2 - (num_items - 1)) < 6 * np.sqrt(2 * (num_items - 1)) + 6


def test_draws_of_neighbouring_steps_and_rows_are_uncorrelated():
    for x, y in (
        (draw(range(5000)), draw(range(5000), step=1)),
        (draw(range(5000)), draw(range(1, 5001))),
        (draw(range(5000))[:, :-1], draw(range(5000))[:, 1:]),
    ):
        assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 0.04


def test_no_rows_and_no_negatives_give_empty_tables():
    assert draw([]).shape == (0, 5)
    assert draw([1, 2], num_negatives=0).shape == (2, 0)
    assert draw([1, 2], num_items=1).tolist() == [[0] * 5] * 2
