"""SpreadMap: the most popular rows dealt evenly to whoever owns them, on any number of ranks.

Every rank asks for the most popular rows in every step, so their owners send more than others, and all wait for the
busiest. A formula puts popular rows anywhere. This map exchanges them with rows that lie better:

    table    ┃ slice 0         ┃ slice 1         ┃ ... ┃ slice 1023
    rank     ┃ 1st, 2048th ... ┃ 513th, 1536th   ┃     ┃ 1024th, 1025th ...

Ranks own contiguous blocks of rows. Slices take turns in an order in which any block of them gets its share early (bits
reversed), and every second turn goes backwards, so that no block is always first. So where rows lie does not depend on
the number of ranks, and neither does what is learnt: a row that has moved takes its first values along.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.embedding.id_map import IdMap
from freescale.embedding.tables.table import EmbeddingTable
from freescale.kernels.rows import find_sorted

SLICES = 1024
_NOBODY = torch.iinfo(torch.int64).max

Ints = npt.NDArray[np.int64]


class SpreadMap:
    """Another map's rows, of which the most popular have changed places with others; still one-to-one.

    Where rows lie is part of what was learnt: it is kept in checkpoints.

    Args:
        inner: a formula.
        ids: that occur.
        counts: how often each of them does.
        most: rows that are dealt out at most.
    """

    learns = False

    def __init__(self, inner: IdMap, *, ids: Ints, counts: Ints, most: int) -> None:
        self.inner, self.num_rows = inner, inner.num_rows
        popular = popular_rows(inner.rows(torch.from_numpy(np.ascontiguousarray(ids))).numpy(), counts, most)
        source, target = exchanged(popular, self.num_rows)
        # As long as it can be, whatever the data: a checkpoint fills it in place.
        self._from = torch.full((2 * most,), _NOBODY, dtype=torch.int64)
        self._to = self._from.clone()
        self._from[: len(source)], self._to[: len(target)] = (
            torch.from_numpy(source),
            torch.from_numpy(target),
        )
        self._elsewhere: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def rows(self, ids: Tensor, *, step: int | None = None) -> Tensor:
        """Row of every id."""
        return self.placed(self.inner.rows(ids, step=step))

    def placed(self, rows: Tensor) -> Tensor:
        """Where rows of the inner map lie now."""
        source, target = self._on(rows.device)
        index, moved = find_sorted(source, rows)
        return torch.where(moved, target[index], rows)

    def move_first_values(self, table: EmbeddingTable) -> None:
        """Give the moved rows of a new table, or of a block of one, the values that they had before."""
        first, last = table.first_row, table.first_row + table.num_rows
        here = (self._to >= first) & (self._to < last)
        source, target = (each[here].to(table.weight.device) for each in (self._from, self._to))
        table.weight[target - first] = table.initial(source - first)

    def state_dict(self) -> dict[str, Tensor]:
        """Where rows lie, and what the other map keeps."""
        return {"spread_from": self._from, "spread_to": self._to, **self.inner.state_dict()}

    def restored(self) -> None:
        """Rows lie as in a checkpoint now."""
        self._elsewhere = {}
        self.inner.restored()

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._elsewhere:
            self._elsewhere[device] = (self._from.to(device), self._to.to(device))
        return self._elsewhere[device]


def popular_rows(rows: Ints, counts: Ints, most: int) -> Ints:
    """The most popular rows, most popular first; ids may share one."""
    unique, inverse = np.unique(rows, return_inverse=True)
    total = np.bincount(inverse, weights=counts).astype(np.int64)
    order = np.lexsort((unique, -total))[:most]
    return np.asarray(unique[order[total[order] > 0]], dtype=np.int64)


def exchanged(popular: Ints, num_rows: int) -> tuple[Ints, Ints]:
    """Rows that move, ascending, and where to: popular ones to their slices, whoever lay there to what they leave."""
    target = even_places(len(popular), num_rows)
    popular = popular[: len(target)]
    driven_out, left = np.setdiff1d(target, popular), np.setdiff1d(popular, target)
    source, to = np.concatenate([popular, driven_out]), np.concatenate([target, left])
    order = np.argsort(source)
    return source[order], to[order]


def even_places(count: int, num_rows: int) -> Ints:
    """Where the first, second, ... most popular row is to lie; fewer than `count` in a small table."""
    slices = 1 << min(SLICES.bit_length(), num_rows.bit_length()) - 1
    edges = np.arange(slices + 1) * num_rows // slices
    sizes = np.diff(edges)
    number = np.arange(min(count, slices * int(sizes.min())))
    turn, place = number // slices, number % slices
    place = _bits_reversed(np.where(turn % 2 == 0, place, slices - 1 - place), slices)
    # Inside a slice, too, they lie apart: a block may end in the middle of one.
    size = int(sizes.min())
    step = next(
        each for each in range(max(1, int(size * 0.6180339887)), 2 * size + 2) if np.gcd(each, size) == 1
    )
    return np.asarray(edges[place] + turn * step % size, dtype=np.int64)


def _bits_reversed(numbers: Ints, slices: int) -> Ints:
    found = np.zeros_like(numbers)
    for bit in range(slices.bit_length() - 1):
        found |= ((numbers >> bit) & 1) << (slices.bit_length() - 2 - bit)
    return found
