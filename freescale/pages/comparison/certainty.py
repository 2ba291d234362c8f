"""How sure a difference between two runs is: an interval from the spread over blocks of steps.

Steps that follow each other are alike: a slow neighbour on the machine, a busy network and long batches last for
many of them. So the steps are cut into up to ten blocks, and the spread is taken over blocks. Where even neighbouring
blocks are alike, the interval is widened by as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

LEVEL = "99 %"
_QUANTILES = {5: 4.604, 6: 4.032, 7: 3.707, 8: 3.499, 9: 3.355, 10: 3.250}
"""Blocks -> Student's t for 99 % and one degree of freedom less."""

_SHORTEST = 8
"""Steps of a block; with fewer, neighbouring blocks are too much alike."""

LEAST_STEPS = _SHORTEST * min(_QUANTILES)
"""With fewer steps there is no telling how much they differ by themselves."""

_MOST_ALIKE = 0.8
"""A few blocks cannot tell more likeness than this from a drift."""


@dataclass(frozen=True)
class Estimate:
    """A value and the interval it lies in, as far as the spread over blocks tells."""

    value: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        """Whether zero lies outside."""
        return self.low > 0 or self.high < 0

    def through(self, change: Callable[[float], float]) -> Estimate:
        """The same on another scale; a falling `change` swaps the ends."""
        ends = sorted((change(self.low), change(self.high)))
        return Estimate(change(self.value), ends[0], ends[1])


def cut_into_blocks(num_steps: int) -> list[range]:
    """Successive steps in five to ten blocks of like length; none where there are too few steps."""
    if num_steps < LEAST_STEPS:
        return []
    number = min(max(_QUANTILES), num_steps // _SHORTEST)
    edges = [place * num_steps // number for place in range(number + 1)]
    return [range(low, high) for low, high in pairwise(edges)]


def jackknife(sums: Sequence[Sequence[float]], statistic: Callable[[Sequence[float]], float]) -> Estimate:
    """A statistic of sums over all blocks, and how much it depends on which blocks there are.

    Args:
        sums: of each block of `cut_into_blocks`, the sums the statistic is made of.
        statistic: from sums over blocks to a number; may raise ValueError where it has no value.

    Raises:
        ValueError: the statistic has no value, with all blocks or without one of them.
    """
    number = len(sums)
    value = statistic(_added(sums))
    # Added up anew each time: taking one large block from the sum would lose the small ones.
    left_out = [statistic(_added([*sums[:place], *sums[place + 1 :]])) for place in range(number)]
    pseudo = [number * value - (number - 1) * without for without in left_out]
    mean = math.fsum(pseudo) / number
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in pseudo) / (number - 1) / number)
    reach = _QUANTILES[number] * error * _widening(pseudo, mean)
    return Estimate(value, value - reach, value + reach)


def log_ratio(after: float, before: float) -> float:
    """log(after / before), of which zero means alike; ValueError where one of them is nothing."""
    if not (after > 0 and before > 0):
        raise ValueError("a ratio needs two values above zero")
    return math.log(after / before)


def _added(sums: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(column) for column in zip(*sums)]


def _widening(values: Sequence[float], mean: float) -> float:
    """By how much blocks that resemble their neighbours understate the spread."""
    squares = math.fsum((value - mean) ** 2 for value in values)
    if squares <= 0:
        return 1.0
    products = math.fsum((a - mean) * (b - mean) for a, b in pairwise(values))
    alike = min(_MOST_ALIKE, max(0.0, products / squares))
    return math.sqrt((1 + alike) / (1 - alike))
