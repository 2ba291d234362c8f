"""The course of a noisy curve: is it noisy at all, its moving average, its moving median."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

Values = Sequence[float | None]
"""One value per step, None where there is none; smoothing leaves these gaps where they are."""


def is_noisy(values: Values) -> bool:
    """Whether a curve goes up and down so much that its course needs a second, smoother line."""
    known = [value for value in values if value is not None]
    if len(known) < 30:
        return False
    # Without the outermost values, or one step that compiled kernels would make all others look calm.
    ranked = sorted(known)
    low, high = ranked[len(ranked) // 50], ranked[-1 - len(ranked) // 50]
    inner = [min(high, max(low, value)) for value in known]
    return sum(abs(after - before) for before, after in pairwise(inner)) > 4 * (high - low)


def moving_average(values: Values, *, span: int) -> list[float | None]:
    """Mean of the `span` values around each one; centred, so that it does not trail the curve."""
    known = [value for value in values if value is not None]
    windows = (known[max(0, row - span // 2) : row + span // 2 + 1] for row in range(len(known)))
    # Summed anew each time: running sums would never recover from one exploded loss.
    return _with_gaps(values, (math.fsum(window) / len(window) for window in windows))


def moving_median(values: Values, *, span: int) -> list[float | None]:
    """Median of the `span` values around each one: what is usual, whatever a few slow steps took."""
    known = [value for value in values if value is not None]
    return _with_gaps(values, _medians(known, span // 2))


def _medians(known: Sequence[float], reach: int) -> Iterable[float]:
    """The sorted window is kept and changed by one value at either end, which costs O(span) a step."""
    window = sorted(known[:reach])
    for row in range(len(known)):
        if row + reach < len(known):
            bisect.insort(window, known[row + reach])
        if row > reach:
            del window[bisect.bisect_left(window, known[row - reach - 1])]
        yield window[len(window) // 2]


def _with_gaps(values: Values, course: Iterable[float]) -> list[float | None]:
    smooth = iter(course)
    return [None if value is None else next(smooth) for value in values]
