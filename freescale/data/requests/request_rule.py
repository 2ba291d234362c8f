"""RequestRule: what requests leave to compute, from their lengths alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from freescale.data.requests.token_rule import TokenRule
from freescale.data.source import IntArray


class RequestRule:
    """What requests leave to compute: n events and k candidates have n (n + 1) / 2 + k (n + 1) pairs.

    Args:
        candidates: of a request; a shorter sequence is all candidates.
        tokens: what features make of its events; one token each unless given.
    """

    def __init__(self, candidates: int, tokens: TokenRule | None = None) -> None:
        self.candidates, self._rule = candidates, tokens or TokenRule()

    def tokens(self, lengths: npt.NDArray[np.integer], /) -> npt.NDArray[np.int64]:
        """Tokens of events and candidates."""
        events, shown = self._parts(lengths)
        return events + shown

    def pairs(self, lengths: npt.NDArray[np.integer], /) -> npt.NDArray[np.int64]:
        """Pairs of a token and one that it sees."""
        events, shown = self._parts(lengths)
        return np.asarray(events * (events + 1) // 2 + shown * (events + 1), np.int64)

    def _parts(self, lengths: npt.NDArray[np.integer]) -> tuple[IntArray, IntArray]:
        sizes = np.asarray(lengths, np.int64)
        shown = np.minimum(sizes, self.candidates)
        front = np.where(sizes > 0, self._rule.front, 0)
        return front + (sizes - shown) * (1 + self._rule.after), shown
