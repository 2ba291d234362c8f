"""Which events make a request: its history as far as it counts, and behind it the candidates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from freescale.data.source import Histories, IntArray
from freescale.jagged import offsets_of, spans


class RequestEvents(NamedTuple):
    """Events and candidates of some requests.

    Args:
        histories: where they are.
        places: there, of each request its events and behind them its candidates; None: they are all there is.
        offsets: [n + 1] where each request begins.
        counts: [n] candidates.
        first: [n] place of the first candidate.
        asked: [n] when; None without times.
        of_user: [n] whose history each is.
    """

    histories: Histories
    places: IntArray | None
    offsets: IntArray
    counts: IntArray
    first: IntArray
    asked: npt.NDArray[np.generic] | None
    of_user: IntArray


def picked(column: npt.NDArray[np.generic], index: IntArray | None) -> npt.NDArray[np.generic]:
    """The values at these places; None: all."""
    return column if index is None else column[index]


def joined(
    past: IntArray, past_offsets: IntArray, shown: IntArray, counts: IntArray
) -> tuple[IntArray, IntArray]:
    """Places of events and behind them those of candidates, request by request; and where each begins."""
    lengths = np.diff(past_offsets) + counts
    offsets = offsets_of(lengths)
    to, _ = spans(offsets[1:] - counts, counts)
    candidate = np.zeros(int(offsets[-1]), bool)
    candidate[to] = True
    index = np.empty(len(candidate), np.int64)
    index[~candidate], index[candidate] = past, shown
    return index, offsets


def last_of(places: IntArray, offsets: IntArray) -> IntArray:
    """[n] the last of each one's places; the first of all where there is none."""
    last = np.maximum(offsets[1:] - 1, 0)
    return places[last] if len(places) else np.zeros(len(last), np.int64)


def strictly_before(
    histories: Histories, base: IntArray, events: IntArray, asked: npt.NDArray[np.generic]
) -> IntArray:
    """How many of each history's first events happened strictly before it was asked, up to the first that did not.

    Events of a log may come late, behind later ones: none that is later than the request gets into its history.
    """
    index, offsets = spans(base, events)
    late = histories.columns["time"][index] >= np.repeat(asked, events)
    # Where the next late one stands, from each event on; behind the last there is none.
    place = np.where(late, np.arange(len(late)), len(late))
    following = np.append(np.minimum.accumulate(place[::-1])[::-1], len(late))
    found: IntArray = np.minimum(following[offsets[:-1]], offsets[1:]) - offsets[:-1]
    return found
