"""The quick fit of the cost model gives what a plain one gives, also where the steps hardly tell."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freescale.balance.costs.cost_fit import MeasuredStep, fit_cost_model
from freescale.balance.costs.cost_model import COEFFICIENTS, CostModel
from freescale.balance.costs.non_negative import solve_grams, solve_rows
from tests.balance.slow_cost_fit import slow_fit
from tests.effort import examples

KINDS = ("unlike", "alike", "one length", "no squares", "no samples")
PRIOR = CostModel(fixed_ms=2.0, per_sample_ms=0.05, per_token_ms=1e-3, per_square_ms=2e-6)


def table_of_steps(
    kind: str, num_steps: int, *, costs: tuple[float, ...], noise: float, pauses: float, seed: int
) -> np.ndarray:
    """[n, 5] the terms of steps and their times."""
    rng = np.random.default_rng(seed)
    terms = np.ones((num_steps, 4))
    for row in terms:
        count = 48 if kind == "alike" else int(rng.integers(1, 64))
        lengths = np.minimum(np.exp(rng.normal(6, 1, count)), 8192).astype(np.int64)
        if kind == "one length":
            lengths[:] = 100
        row[1:] = count, lengths.sum(), np.square(lengths).sum()
    if kind == "no squares":
        terms[:, 3] = 0
    if kind == "no samples":
        terms[:, 1] = 0
    times = terms @ np.array(costs) + 1e-3
    times *= np.clip(rng.normal(1, noise, num_steps), 0.5, 1.5)
    times *= np.where(rng.random(num_steps) < pauses, rng.uniform(2, 20, num_steps), 1.0)
    return np.column_stack((terms, times))


def tables(*, noise: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
    costs = st.tuples(
        *(st.sampled_from(pair) for pair in ((0.0, 3.0), (0.0, 0.02), (5e-4, 2e-3), (0.0, 1e-6)))
    )
    return st.builds(
        table_of_steps,
        st.sampled_from(KINDS),
        st.integers(10, 150),
        costs=costs,
        noise=noise,
        pauses=st.sampled_from([0.0, 0.1]),
        seed=st.integers(0, 2**32 - 1),
    )


def both(table: np.ndarray, prior: CostModel | None) -> tuple[np.ndarray, np.ndarray, float, float]:
    """[4] coefficients by the quick and the plain fit, as shares of a typical step, and the errors of both."""
    fit = fit_cost_model([MeasuredStep(*row[1:]) for row in table.tolist()], prior=prior, prior_steps=8.0)
    near = None if prior is None else (np.array([getattr(prior, name) for name in COEFFICIENTS]), 8.0)
    coefficients, inliers, error = slow_fit(table[:, :4], table[:, 4], near)
    assert fit.num_steps == inliers.sum()
    typical = np.median(table[:, :4] / table[:, 4:], axis=0)
    quick = np.array([getattr(fit.model, name) for name in COEFFICIENTS])
    return quick * typical, coefficients * typical, fit.error, error


@examples(8, thorough=200)
@given(table=tables(noise=st.sampled_from([0.01, 0.1])), prior=st.sampled_from([None, PRIOR]))
def test_the_quick_fit_is_the_plain_fit(table, prior):
    quick, plain, error, plain_error = both(table, prior)
    np.testing.assert_allclose(quick, plain, atol=1e-4)
    assert error == pytest.approx(plain_error, abs=1e-4)


@example(
    table=table_of_steps("unlike", 10, costs=(0.0, 0.0, 5e-4, 0.0), noise=0.0, pauses=0.1, seed=2724),
    prior=PRIOR,
)
@settings(max_examples=10, deadline=None)
@given(table=tables(noise=st.just(0.0)), prior=st.sampled_from([None, PRIOR]))
def test_without_noise_both_explain_the_steps_alike(table, prior):
    # What a coefficient gets of an effect that several explain exactly is decided by the last bit.
    quick, plain, error, plain_error = both(table, prior)
    assert quick.sum() == pytest.approx(plain.sum(), abs=1e-6)
    assert error == pytest.approx(plain_error, rel=1e-4, abs=1e-6)


def test_terms_that_are_the_same_share_their_effect():
    table = table_of_steps("one length", 60, costs=(0.0, 0.02, 2e-3, 0.0), noise=0.05, pauses=0.0, seed=3)
    quick, plain, *_ = both(table, None)
    np.testing.assert_allclose(quick, plain, atol=1e-6)
    assert quick[1] > 0.1
    np.testing.assert_allclose(quick[1:], quick[1], rtol=1e-6)


@examples(33, thorough=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_problems=st.integers(1, 4),
    likeness=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
)
def test_grams_and_rows_have_the_same_solution_whatever_the_guess(seed, num_problems, likeness):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_problems, 30, 5))
    rows[:, :, 1] = likeness * rows[:, :, 0] + (1 - likeness) * rows[:, :, 1]
    rows[:, :, 4] += 0.5 * rows[:, :, :4].sum(axis=2)
    grams = rows.transpose(0, 2, 1) @ rows
    solutions, doubtful = solve_grams(grams, rng.random((num_problems, 4)) < 0.5)
    assert not doubtful.any()
    assert (solutions >= 0).all()
    for solution, one in zip(solutions, rows):
        np.testing.assert_allclose(solution, solve_rows(one), rtol=1e-6, atol=1e-9)


def test_grams_of_terms_that_are_the_same_are_left_to_the_rows():
    rows = np.random.default_rng(0).random((2, 30, 5))
    rows[1, :, 2] = 3 * rows[1, :, 1]
    _, doubtful = solve_grams(rows.transpose(0, 2, 1) @ rows, np.ones((2, 4), dtype=np.bool_))
    assert doubtful.tolist() == [False, True]


def test_a_refit_takes_less_time_than_the_plain_one():
    # A sixth of it; both in the time of this thread, best of some, in turn.
    table = table_of_steps("unlike", 1024, costs=(3.0, 0.0, 2e-3, 1e-6), noise=0.03, pauses=0.05, seed=1)
    steps = [MeasuredStep(*row[1:]) for row in table.tolist()]
    quick, plain = [], []
    for _ in range(5):
        begin = time.thread_time()
        fit_cost_model(steps)
        quick.append(time.thread_time() - begin)
        begin = time.thread_time()
        slow_fit(table[:, :4], table[:, 4], None)
        plain.append(time.thread_time() - begin)
    assert min(quick) < min(plain)
