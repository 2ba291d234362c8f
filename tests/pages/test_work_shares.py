"""How evenly work was shared, by CPU time: known of CPU ranks, sure where steps agree."""

from __future__ import annotations

import random

import pytest

from freescale.pages.work_shares import compare_work, work_of_steps
from freescale.trace import KeptStep, Parts, RankSpans, RunSpans


def spans(cpu: list[list[float | None]]) -> RunSpans:
    """cpu[rank][step - 1]."""
    parts = Parts(1.0, 1.0, 0.0, 0.0)
    return RunSpans(
        [
            RankSpans(
                rank,
                {},
                {
                    step: KeptStep(step, 0.0, 1.0, parts, cpu=value)
                    for step, value in enumerate(steps, start=1)
                },
            )
            for rank, steps in enumerate(cpu)
        ]
    )


def test_work_is_that_of_the_busiest_rank_and_of_the_mean_one():
    assert work_of_steps(spans([[3.0, 1.0], [1.0, 1.0]])) == {1: (3.0, 2.0), 2: (1.0, 1.0)}


@pytest.mark.parametrize("cpu", [[[1.0]], [[None], [1.0]], [[None], [None]], [[0.0], [0.0]]])
def test_one_rank_and_ranks_on_devices_have_none(cpu):
    assert work_of_steps(spans(cpu)) == {}


def test_a_difference_is_told_with_what_it_may_be():
    rng = random.Random(1)
    uneven = {step: (1.0 + rng.uniform(0.3, 0.5), 1.0) for step in range(1, 61)}
    even = {step: (1.0 + rng.uniform(0.0, 0.1), 1.0) for step in range(1, 61)}
    found = compare_work(uneven, even)
    assert found.before == pytest.approx(1.4, abs=0.03)
    assert found.after == pytest.approx(1.05, abs=0.02)
    assert found.verdict().startswith("more even, ")
    assert compare_work(even, uneven).verdict().startswith("less even, ")
    assert compare_work(uneven, dict(uneven)).verdict() == "no difference beyond noise"


def test_few_steps_and_no_steps_say_so():
    few = dict.fromkeys(range(1, 6), (1.5, 1.0))
    assert compare_work(few, few).verdict() == "too few steps to tell"
    assert compare_work(few, {}) is None
