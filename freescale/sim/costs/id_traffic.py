"""How many rows a batch of Zipf ids touches, and how many of them the batch before touched, too: expected values.

An id of probability p is in a batch of n draws with probability 1 - (1 - p)^n. Sums of that over all ids give distinct
rows, rows that two batches share, and occurrences of shared rows. Ids are summed in bins of like probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from freescale.balance import FloatArray

# Every id on its own up to here, then bins that grow by this factor: exact to 1e-4 and fast for 10^9 rows.
_SINGLE, _GROWTH = 1024, 1.02
_GRID = 192


@dataclass(frozen=True)
class IdModel:
    """Where ids come from.

    Args:
        rows: different ids.
        zipf: exponent of their popularity; 0 draws all alike.
        uniform: share of the draws to which all ids are alike: negatives.
    """

    rows: int
    zipf: float
    uniform: float = 0.0

    @cached_property
    def _bins(self) -> tuple[FloatArray, FloatArray]:
        """Ids of each bin, and the probability of one of them."""
        edges = list(range(1, min(self.rows, _SINGLE) + 1))
        place = float(_SINGLE)
        while place < self.rows:
            place = min(max(place + 1, place * _GROWTH), float(self.rows))
            edges.append(int(place))
        ranks = np.array(sorted(set(edges)), dtype=np.float64)
        counts = np.diff(ranks, prepend=0.0)
        middle = ranks - (counts - 1) / 2
        weights = middle**-self.zipf
        popular = weights / float((counts * weights).sum())
        return counts, (1 - self.uniform) * popular + self.uniform / self.rows

    def distinct(self, draws: FloatArray) -> FloatArray:
        """Expected different ids among so many draws."""
        return self._on_grid(draws, lambda n: self._sum(_seen(self._bins[1], n)))

    def shared(self, draws: FloatArray, other: float) -> FloatArray:
        """Expected different ids among `draws` that are also among `other` further draws."""
        there = _seen(self._bins[1], other)
        return self._on_grid(draws, lambda n: self._sum(_seen(self._bins[1], n) * there))

    def shared_occurrences(self, other: float) -> float:
        """Share of all draws whose id is also among `other` further draws."""
        probability = self._bins[1]
        return self._sum(probability * _seen(probability, other))

    def asked_by(self, draws: float, other: float, *, which: str = "all") -> tuple[FloatArray, FloatArray]:
        """Rows of each bin, and with which probability a batch of `draws` asks for one of them.

        All, or only those that `other` further draws ask for, too ("shared"), or do not ("alone").
        """
        asked = _seen(self._bins[1], draws)
        there = _seen(self._bins[1], other)
        share = {"all": np.ones_like(there), "shared": there, "alone": 1 - there}[which]
        return self._bins[0], asked * share

    def _sum(self, values: FloatArray) -> float:
        return float((self._bins[0] * values).sum())

    def _on_grid(self, draws: FloatArray, value: object) -> FloatArray:
        """A smooth function of n, computed at few places and read off between them."""
        draws = np.asarray(draws, dtype=np.float64)
        low, high = max(1.0, float(draws.min(initial=1.0))), max(2.0, float(draws.max(initial=2.0)))
        grid = np.unique(np.concatenate(([0.0, 1.0], np.geomspace(low, high * (1 + 1e-9), _GRID))))
        assert callable(value)
        return np.interp(draws, grid, [0.0 if n == 0 else value(n) for n in grid])


def _seen(probability: FloatArray, draws: float) -> FloatArray:
    return np.asarray(-np.expm1(draws * np.log1p(-np.minimum(probability, 1 - 1e-12))), dtype=np.float64)
