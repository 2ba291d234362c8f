"""A dilated mask from outside the package: every k-th earlier event, and the latest ones."""

from dataclasses import dataclass

from freescale import register


@dataclass(frozen=True, kw_only=True)
class DilatedOptions:
    """Keys of a recipe, in the section `model`."""

    every: int = 3
    near: int = 2


@register("mask", "dilated", options=DilatedOptions)
class Dilated:
    """The kind and, since it knows nothing of a batch, the mask itself."""

    looks_ahead, per_token, per_sequence = False, {}, {}

    def __init__(self, options):
        self.every, self.near = options.every, options.near

    def for_batch(self, columns, layout):
        return self

    def sees(self, i, j, *, length, query, key, sequence):
        return ((i - j) % self.every == 0) | (i - j <= self.near)
