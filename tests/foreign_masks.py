"""Masks as somebody outside the package would write them, and the same in plain Python, pair by pair."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.registry import register


class Dilated:
    """Every `every`-th earlier token, and the last `near` of them."""

    looks_ahead = False

    def __init__(self, every: int = 3, near: int = 2) -> None:
        self.every, self.near = every, near
        self.per_token: dict[str, Tensor] = {}
        self.per_sequence: dict[str, Tensor] = {}

    def sees(self, i, j, *, length, query, key, sequence):
        return ((i - j) % self.every == 0) | (i - j <= self.near)

    def plainly(self, i: int, j: int, length: int, token: int, other: int, number: int) -> bool:
        return j <= i and ((i - j) % self.every == 0 or i - j <= self.near)


class SameCategory:
    """Tokens of the own category, not oneself: the first of a category sees nothing at all."""

    def __init__(self, category: Tensor, *, looks_ahead: bool = False) -> None:
        self.category, self.looks_ahead = category, looks_ahead
        self.per_token = {"category": category}
        self.per_sequence: dict[str, Tensor] = {}

    def sees(self, i, j, *, length, query, key, sequence):
        return (query["category"] == key["category"]) & (i != j)

    def plainly(self, i: int, j: int, length: int, token: int, other: int, number: int) -> bool:
        same = int(self.category[token]) == int(self.category[other])
        return same and i != j and (self.looks_ahead or j < i)


class FromTheEnd:
    """Tokens that stand at most a reach before the end of their sequence, one reach a sequence; and oneself."""

    looks_ahead = True

    def __init__(self, reach: Tensor) -> None:
        self.reach = reach
        self.per_token: dict[str, Tensor] = {}
        self.per_sequence = {"reach": reach}

    def sees(self, i, j, *, length, query, key, sequence):
        return (length - j <= sequence["reach"]) | (i == j)

    def plainly(self, i: int, j: int, length: int, token: int, other: int, number: int) -> bool:
        return length - j <= int(self.reach[number]) or i == j


def matrix(plainly: Callable[..., bool], lengths: list[int]) -> Tensor:
    """[T, T] of a whole batch, true where row sees column."""
    seen = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    starts = [0, *itertools.accumulate(lengths)]
    for number, length in enumerate(lengths):
        for i, j in itertools.product(range(length), repeat=2):
            token, other = starts[number] + i, starts[number] + j
            seen[token, other] = plainly(i, j, length, token, other, number)
    return seen


@dataclass(frozen=True, kw_only=True)
class CategoryOptions:
    """Options of the kind below."""

    column: str = "category"


@register("mask", "test_same_category", options=CategoryOptions)
class CategoryKind:
    """Makes a `SameCategory` of a column of the batch."""

    def __init__(self, options: CategoryOptions) -> None:
        self.column = options.column

    def for_batch(self, columns, layout):
        return SameCategory(columns[self.column])


@register("mask", "test_dilated")
class DilatedKind:
    """Makes a `Dilated`."""

    def __init__(self, options: None) -> None:
        self.mask = Dilated()

    def for_batch(self, columns, layout):
        return self.mask
