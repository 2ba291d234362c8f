"""Vectors in 8 bits: each row as whole numbers from -127 to 127 and one factor; smaller, and no longer bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from freescale.errors import DataError

_MOST = 127


class Rounded(NamedTuple):
    """Rounded vectors.

    Args:
        numbers: [n, dim] int8.
        factors: [n] float32; a row is its numbers times its factor.
    """

    numbers: npt.NDArray[np.int8]
    factors: npt.NDArray[np.float32]

    def take(self, index: npt.NDArray[np.int64]) -> Rounded:
        """Some rows."""
        return Rounded(self.numbers[index], self.factors[index])

    def vectors(self) -> npt.NDArray[np.float32]:
        """[n, dim] what they stand for; the same bits wherever it is worked out."""
        return self.numbers.astype(np.float32) * self.factors[:, None]


def rounded(vectors: npt.NDArray[np.float32]) -> Rounded:
    """Each row rounded to 8 bits: no number is further off than half of its row's factor, and a hair of rounding."""
    largest = np.abs(vectors).max(axis=1, initial=0.0)
    if not np.isfinite(largest).all():
        raise DataError("a vector that is no number cannot be rounded to int8", got="NaN or infinite")
    factors = (largest / np.float32(_MOST)).astype(np.float32)
    safe = np.where(factors > 0, factors, np.float32(1))
    numbers = np.clip(np.rint(vectors / safe[:, None]), -_MOST, _MOST).astype(np.int8)
    return Rounded(numbers, factors)
