"""TokenRule: how many tokens a history becomes: some in front of it, and one or more for each event."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenRule:
    """Tokens of a history of n events: front + n (1 + after); none where there are no events.

    Args:
        front: tokens before the first event.
        after: tokens behind each event.
    """

    front: int = 0
    after: int = 0

    def tokens(self, lengths: npt.NDArray[np.integer], /) -> npt.NDArray[np.int64]:
        """[n] of histories of these lengths."""
        sizes = np.asarray(lengths, np.int64)
        return np.where(sizes > 0, self.front + sizes * (1 + self.after), 0)

    def events(self, tokens: int, /) -> int:
        """Events of the longest history that becomes at most so many tokens."""
        return (tokens - self.front) // (1 + self.after)

    def pairs(self, lengths: npt.NDArray[np.integer], /) -> npt.NDArray[np.int64]:
        """[n] pairs (a token, one that it sees) of each."""
        tokens = self.tokens(lengths)
        return tokens * (tokens + 1) // 2
