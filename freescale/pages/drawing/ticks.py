"""Ticks of an axis: round numbers around what is shown, and labels that tell one from the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_SIZES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k"))
"""From which number on a suffix is used; four digits are as short without one."""

_MOST_DECIMALS = 12
_NEAREST = 0.09
"""Labels closer than this share of the axis would run into each other on a phone."""


def nice_ticks(low: float, high: float, *, at_most: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5, 5 times a power of ten) inside low..high."""
    if not high > low:
        return [low]
    step = _round_step(low, high, at_most)
    return _multiples(step, math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9))


def enclosing_ticks(low: float, high: float, *, at_most: int = 5) -> list[float]:
    """Round numbers of which the first is at or below low and the last at or above high."""
    if not high > low:
        return [low]
    step = _round_step(low, high, at_most)
    return _multiples(step, math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9))


def step_ticks(left: float, right: float) -> list[float]:
    """Whole round steps, and the last step itself: the end of a curve is a number on the axis."""
    whole = [tick for tick in nice_ticks(left, right) if float(tick).is_integer()]
    return [*(tick for tick in whole if tick < right and right - tick >= _NEAREST * (right - left)), right]


def spread_ticks(places: Sequence[float], positions: Sequence[float]) -> list[float]:
    """The values that were tried, as far as their labels have room; the last one always. `positions`: 0 to 1."""
    kept: list[tuple[float, float]] = []
    for value, position in sorted(zip(places, positions), reverse=True):
        if not kept or kept[-1][1] - position >= _NEAREST:
            kept.append((value, position))
    return [value for value, _ in reversed(kept)]


def plain_labels(ticks: Sequence[float]) -> list[str]:
    """Numbers in one unit with as many decimals as tell them apart: `0 20k 40k`, `1.000 1.002`, `2e-4`."""
    largest = max(map(abs, ticks), default=0.0)
    if 0 < largest < 1e-3:
        power = math.floor(math.log10(largest))
        return _labels(ticks, 10.0**power, f"e{power}")
    suffix = next((suffix for least, suffix in _SIZES if largest >= least), "")
    return _labels(ticks, {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(suffix, 1.0), suffix)


def percent_labels(ticks: Sequence[float]) -> list[str]:
    """Shares as percentages: `0% 20% 40%`, `0% 0.5% 1.0%`."""
    return _labels(ticks, 0.01, "%")


def _labels(ticks: Sequence[float], size: float, suffix: str) -> list[str]:
    values = [tick / size for tick in ticks]
    gap = min((abs(b - a) for a, b in pairwise(values)), default=abs(values[0]) if values else 0.0)
    for decimals in range(_MOST_DECIMALS + 1):
        if all(abs(round(value, decimals) - value) <= 1e-3 * gap for value in values):
            break
    zero = "0%" if suffix == "%" else "0"
    return [zero if value == 0 else f"{value:,.{decimals}f}{suffix}" for value in values]


def _round_step(low: float, high: float, at_most: int) -> float:
    rough = (high - low) / at_most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * (1 - 1e-9))


def _multiples(step: float, first: int, last: int) -> list[float]:
    # Rounding to the step's own digits keeps 0.30000000000000004 off the axis.
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(index * step, digits) for index in range(first, last + 1)]
