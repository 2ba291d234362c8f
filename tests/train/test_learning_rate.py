"""The learning rate at its corners and in between."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.train.learning_rate import lr_factor


def constant(step, warmup=0, total=100):
    return lr_factor(step, schedule="constant", warmup_steps=warmup, total_steps=total)


def cosine(step, warmup=0, total=100):
    return lr_factor(step, schedule="cosine", warmup_steps=warmup, total_steps=total)


def test_warm_up_rises_in_equal_parts_to_the_full_rate():
    for schedule in (constant, cosine):
        assert [schedule(step, warmup=4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
        assert schedule(4, warmup=4) == 1.0


def test_constant_stays():
    assert {constant(step) for step in range(100)} == {1.0}


def test_cosine_falls_from_one_through_half_to_zero():
    assert cosine(0) == 1.0
    assert cosine(50) == pytest.approx(0.5)
    assert cosine(25) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert cosine(100) == pytest.approx(0.0)
    assert cosine(55, warmup=10) == pytest.approx(0.5)


@given(st.integers(0, 50), st.integers(1, 60))
def test_the_rate_never_leaves_zero_to_one_and_never_rises_after_warm_up(warmup, total):
    for schedule in (constant, cosine):
        rates = [schedule(step, warmup=warmup, total=total) for step in range(total + 20)]
        assert all(0 <= rate <= 1 for rate in rates)
        after = rates[warmup:]
        assert all(x >= y - 1e-12 for x, y in itertools.pairwise(after))
