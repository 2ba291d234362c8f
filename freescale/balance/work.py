"""How much there is to compute in a sample of a given length: tokens, and pairs of tokens that attention meets."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from freescale.balance.arrays import FloatArray

Lengths = npt.NDArray[np.integer] | npt.NDArray[np.floating]


class PairRule(Protocol):
    """A rule by which sequences grow tokens and lose pairs; `data.segment_rule.SegmentRule` is one."""

    def tokens(self, lengths: npt.NDArray[np.integer], /) -> npt.NDArray[np.int64]:
        """Tokens of each sequence."""

    def pairs(self, lengths: npt.NDArray[np.integer], /) -> npt.NDArray[np.int64]:
        """Pairs (a token, one that it sees) of each sequence."""


class SampleWork:
    """Tokens and squares of samples, the two numbers a cost model multiplies.

    A whole causal sequence of L tokens has L (L + 1) / 2 pairs, and its square is L^2. A sequence under a mask has the
    square that a whole one with as many pairs and tokens would have: 2 * pairs - tokens.

    Args:
        rule: what the mask leaves; None for whole sequences.
    """

    def __init__(self, rule: PairRule | None = None) -> None:
        self._rule = rule

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out or added."""
        return self._rule is None

    def tokens(self, lengths: Lengths) -> FloatArray:
        """[n] tokens of each sample."""
        if self._rule is None:
            return np.asarray(lengths, np.float64)
        return np.asarray(self._rule.tokens(np.asarray(lengths, np.int64)), np.float64)

    def squares(self, lengths: Lengths) -> FloatArray:
        """[n] squared length of a whole sequence with as much attention."""
        if self._rule is None:
            return np.square(np.asarray(lengths, np.float64))
        sizes = np.asarray(lengths, np.int64)
        return np.asarray(2 * self._rule.pairs(sizes) - self._rule.tokens(sizes), np.float64)


WHOLE = SampleWork()
