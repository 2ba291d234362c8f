"""Compiled CPU loop of `moe_routing`. Import this module where it is used: loading numba takes half a second."""

from __future__ import annotations

from typing import Any

from numba import int32, njit, void
from numpy.typing import NDArray

IntArray = NDArray[Any]
INTS = int32[::1]


@njit(void(INTS, int32, INTS, INTS, INTS), cache=True, nogil=True, error_model="numpy")
def group(experts: IntArray, choices: int, tokens: IntArray, places: IntArray, offsets: IntArray) -> None:
    """Fill `tokens`, `places` and `offsets` from the expert of every choice: count, sum up, then hand out places."""
    offsets[:] = 0
    for expert in experts:
        offsets[expert + 1] += 1
    for expert in range(len(offsets) - 1):
        offsets[expert + 1] += offsets[expert]
    taken = offsets[:-1].copy()
    for choice in range(len(experts)):
        place = taken[experts[choice]]
        taken[experts[choice]] = place + 1
        tokens[place] = choice // choices
        places[choice] = place
