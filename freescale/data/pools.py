"""PoolIndex: of each kind of event the last few before a moment, merged by time, without reading what lies between.

Likes are rare and plays are many: a history of the last n events would hold no like at all. So every kind has a pool of
its own, and a sample takes the last events of each. Where the events of a kind stand is noted once; a sample finds its
part by two searches a kind: what lies between is never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from freescale.data.source import Histories, IntArray
from freescale.jagged import offsets_of


@dataclass(frozen=True)
class PoolRule:
    """What a history is made of.

    Args:
        column: tells events apart.
        kinds: its values, one a pool; events of others belong to none.
        each: events of every kind at most.
        window: events before the moment among which they are looked for.
    """

    column: str
    kinds: tuple[int, ...]
    each: int
    window: int


@runtime_checkable
class IndexedSource(Protocol):
    """A source that finds single events of histories without reading the rest."""

    offsets: IntArray

    def pools(self, rule: PoolRule) -> PoolIndex:
        """Where the events of each kind stand among all events."""

    def events(self, rows: IntArray, places: IntArray, offsets: IntArray) -> Histories:
        """The events at these places among all events, as histories of these rows."""


class PoolIndex:
    """Where the events of each kind stand in some histories.

    Args:
        kind: [events] what each event is, history after history.
        offsets: [n + 1] where histories begin.
        rule: what to keep.
    """

    _places: list[Any]

    def __init__(self, kind: npt.NDArray[np.generic], offsets: IntArray, rule: PoolRule) -> None:
        self._offsets, self._rule = offsets, rule
        self._places = [np.flatnonzero(kind == each) for each in rule.kinds]

    @classmethod
    def of_places(
        cls, places: Sequence[npt.NDArray[np.generic]], offsets: IntArray, rule: PoolRule
    ) -> PoolIndex:
        """The same where somebody knows the places of each kind, ascending."""
        made = cls.__new__(cls)
        made._offsets, made._rule, made._places = offsets, rule, list(places)
        return made

    def counts(self, histories: IntArray, ends: IntArray) -> IntArray:
        """[n] events that `spans` finds for each."""
        total = np.zeros(len(ends), np.int64)
        for low, high in self._limits(histories, ends):
            total += high - low
        return total

    def spans(
        self, histories: IntArray, ends: IntArray, *, most: int | None = None
    ) -> tuple[IntArray, IntArray]:
        """(places, offsets): of each history what is kept of its first events, ascending, one after the other.

        Args:
            histories: their numbers.
            ends: of each, so many first events are looked at.
            most: keep no more than the last so many of them.
        """
        limits = self._limits(histories, ends)
        parts = []
        for number in range(len(ends)):
            found = [places[low[number] : high[number]] for places, (low, high) in zip(self._places, limits)]
            merged = np.concatenate(found)
            merged.sort(kind="stable")  # by runs: each part ascends already
            parts.append(merged if most is None else merged[max(0, len(merged) - most) :])
        offsets = offsets_of([len(part) for part in parts])
        return np.concatenate([np.zeros(0, np.int64), *parts]), offsets

    def _limits(self, histories: IntArray, ends: IntArray) -> list[tuple[IntArray, IntArray]]:
        """Of each pool, which part of its places counts for each history."""
        first = self._offsets[histories]
        stop = first + ends
        start = np.maximum(first, stop - self._rule.window)
        found = []
        for places in self._places:
            low, high = np.searchsorted(places, start), np.searchsorted(places, stop)
            found.append((np.maximum(low, high - self._rule.each), high))
        return found
