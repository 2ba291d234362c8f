"""How often noise is called a difference, where the truth is known: runs that differ in nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from freescale.pages.comparison.certainty import LEAST_STEPS, Estimate, cut_into_blocks, jackknife, log_ratio

TRIES = 200

Noise = Callable[[int, random.Random], list[float]]


def white(steps: int, draw_from: random.Random) -> list[float]:
    return [math.exp(draw_from.gauss(0, 0.2)) for _ in range(steps)]


def in_waves(steps: int, draw_from: random.Random) -> list[float]:
    """A neighbour that comes and goes: steps resemble those before them."""
    values, level = [], draw_from.gauss(0, 1)
    for _ in range(steps):
        level = 0.8 * level + 0.6 * draw_from.gauss(0, 1)
        values.append(math.exp(0.2 * level))
    return values


def with_stalls(steps: int, draw_from: random.Random) -> list[float]:
    """One step in twenty takes several times as long, now and then very long."""
    return [
        1 + 0.05 * draw_from.random() + (draw_from.paretovariate(1.5) if draw_from.random() < 0.05 else 0)
        for _ in range(steps)
    ]


def compared(before: list[float], after: list[float]) -> Estimate:
    blocks = cut_into_blocks(len(before))
    sums = [[sum(values[row] for row in block) for values in (before, after)] for block in blocks]
    return jackknife(sums, lambda added: log_ratio(added[1], added[0]))


@pytest.mark.parametrize("noise", [white, in_waves, with_stalls])
@pytest.mark.parametrize("steps", [40, 200])
def test_noise_is_rarely_called_a_difference(noise: Noise, steps: int) -> None:
    draw_from = random.Random(steps)
    called = sum(compared(noise(steps, draw_from), noise(steps, draw_from)).is_sure for _ in range(TRIES))
    # 99 % intervals; waves as long as a block cost some of that.
    assert called <= 0.05 * TRIES, called


@pytest.mark.parametrize("noise", [white, in_waves])
def test_a_real_difference_is_called_by_its_size(noise: Noise) -> None:
    draw_from = random.Random(2)
    found = [
        compared(noise(200, draw_from), [1.5 * value for value in noise(200, draw_from)])
        for _ in range(TRIES // 4)
    ]
    assert sum(one.is_sure and one.value > 0 for one in found) >= 0.95 * len(found)
    held = sum(one.low <= math.log(1.5) <= one.high for one in found)
    assert held >= 0.9 * len(found), "the truth lies inside"


def test_the_same_steps_in_both_runs_cancel() -> None:
    """Steps are paired: long batches are long in both runs and tell nothing."""
    lengths = white(60, random.Random(1))
    found = compared(lengths, [1.02 * value for value in lengths])
    assert found.low == pytest.approx(math.log(1.02))
    assert found.high == pytest.approx(math.log(1.02))
    assert found.is_sure


def test_few_steps_make_no_blocks_and_blocks_hold_every_step() -> None:
    assert cut_into_blocks(LEAST_STEPS - 1) == []
    for steps in (LEAST_STEPS, 57, 1001):
        assert [row for block in cut_into_blocks(steps) for row in block] == list(range(steps))


def test_a_falling_scale_swaps_the_ends() -> None:
    assert Estimate(1, 0, 2).through(lambda value: -value) == Estimate(-1, -2, 0)


def test_a_ratio_of_nothing_has_no_value() -> None:
    with pytest.raises(ValueError, match="above zero"):
        jackknife([[1.0, 0.0]] * 10, lambda added: log_ratio(added[1], added[0]))
