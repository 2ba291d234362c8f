"""How much of a proof CI runs, and how much more `make test-slow` does: nothing that leaves CI is left out there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

THOROUGH = "thorough"
"""The profile of hypothesis that `make test-slow` asks for."""


def slow(*values: Any) -> Any:
    """A case for `make test-slow` only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def along_edges(
    *axes: Collection[Any], also: Callable[..., bool] = lambda *values: False, flip: int = 0
) -> list[Any]:
    """Every combination of the axes' values. CI runs some: each value of each axis is met, beside changing others.

    Args:
        axes: the values; those of the longest are gone through once, those of the others again and again.
        also: further combinations for CI.
        flip: the others start that many values later, so that neighbouring tests meet other pairs.
    """
    longest = max(range(len(axes)), key=lambda axis: len(axes[axis]))
    in_ci = {
        tuple(n if axis == longest else (n + flip) % len(values) for axis, values in enumerate(axes))
        for n in range(len(axes[longest]))
    }
    cases: Iterable[tuple[tuple[int, Any], ...]] = product(*(enumerate(values) for values in axes))
    chosen = []
    for case in cases:
        values = tuple(value for _, value in case)
        quick = tuple(n for n, _ in case) in in_ci or also(*values)
        chosen.append(pytest.param(*values) if quick else slow(*values))
    return chosen


def quick_first(values: Iterable[Any], *in_ci: Any) -> list[Any]:
    """All values as cases; CI runs those named."""
    return [value if value in in_ci else slow(value) for value in values]


def examples(in_ci: int, thorough: int) -> settings:
    """So many examples of hypothesis in CI, and so many where minutes are given."""
    many = settings.get_current_profile_name() == THOROUGH
    return settings(max_examples=thorough if many else in_ci, deadline=None)
