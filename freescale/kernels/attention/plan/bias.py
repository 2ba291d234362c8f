"""BiasPlan: which pairs of tiles give to which weights of the bias tables, and the fixed order they are added in.

A program goes through a run of pairs of tiles on one diagonal, so that what it adds up has the same distances in every
one of them, and writes its sums in rows of `columns` numbers: some by distance, then some by bucket. Rows that belong
together, a group, are added in two steps: first some of a group at a time, then the results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.jagged import group_index
from freescale.kernels.attention.mask import Ints
from freescale.kernels.attention.reference import NUM_TIME_BUCKETS
from freescale.kernels.runtime import Carrier

# Rows that a program adds up in the first step.
CHUNK = 128


class SumStep(NamedTuple):
    """Rows to add: `order` lists them group by group, `starts` where each group begins, and the end."""

    order: Tensor
    starts: Tensor


class BiasPlan(NamedTuple):
    """How the gradients of the bias tables are summed.

    Args:
        runs: a work list of runs, part by part, diagonal by diagonal: the third and fourth field are row and column
            tile of the first pair, the fifth is how many there are.
        part_runs: where the programs of each part begin, and the end.
        first_group: number of the first group of distances, negative where keys ahead of their query are seen. Number
            n of group g belongs to distance (g - 1) * columns + 1 + n.
        num_groups: groups of distances; those of buckets follow.
        num_chunks: programs of the first step that add up distances; those of buckets follow.
        chunks: the first step.
        groups: the second.
    """

    runs: Tensor
    part_runs: list[int]
    first_group: int
    num_groups: int
    num_chunks: int
    chunks: SumStep
    groups: SumStep

    def carried(self, carrier: Carrier) -> BiasPlan:
        """The same on another device."""
        arrays = [x.numpy() for x in (self.runs, *self.chunks, *self.groups)]
        runs, *steps = carrier.add(*arrays)
        return self._replace(runs=runs, chunks=SumStep(*steps[:2]), groups=SumStep(*steps[2:]))


def bucket_rows(columns: int) -> int:
    """Rows of sums that hold all buckets."""
    return -(-NUM_TIME_BUCKETS // columns)


def diagonals(tiles: Ints, *, rows: int, columns: int) -> Ints:
    """How many tiles of keys lie between the positions of a pair; targets all stand where the events end."""
    row, column, events = tiles[:, 2], tiles[:, 3], tiles[:, 6]
    found: Ints = np.minimum(row, events // rows) * (rows // columns) - np.minimum(column, events // columns)
    return found


def joined(tiles: Ints, *, size: int, limit: int) -> Ints:
    """Square tiles that follow each other on a diagonal of a sequence as one, at most `limit` of them together."""
    diagonal = diagonals(tiles, rows=size, columns=size)
    order = np.lexsort((tiles[:, 2], tiles[:, 2] - tiles[:, 3], diagonal, tiles[:, 0]))
    tiles, diagonal = tiles[order], diagonal[order]
    index = np.arange(len(tiles))
    follows = (np.diff(tiles[:, 0]) == 0) & (np.diff(diagonal) == 0)
    follows &= (np.diff(tiles[:, 2]) == 1) & (np.diff(tiles[:, 3]) == 1)
    since = index - np.maximum.accumulate(np.where(np.concatenate([[False], follows]), 0, index))
    first = np.flatnonzero(since % limit == 0)
    out = tiles[first]
    out[:, 4] = np.diff(first, append=len(tiles))
    return out


def plan_bias(runs: Ints, part: Ints, num_parts: int, *, wide: int, columns: int) -> BiasPlan:
    """Plan for these runs of these parts; a tile is `columns` wide and `wide` times as high."""
    from freescale.kernels.attention.plan.tile_pair_loops import ordered

    diagonal = diagonals(runs, rows=wide * columns, columns=columns)
    lowest, highest = int(diagonal.min(initial=0)), int(diagonal.max(initial=0))
    span = highest - lowest + 1
    # Near the diagonal a tile has most buckets, so most to do: these first.
    order, edges = ordered(part * span + (diagonal - lowest), num_parts * span)
    runs, diagonal = runs[order], diagonal[order]
    # Of each program, the groups that its rows of sums belong to: some of distances, then all of buckets.
    first = min(0, lowest)
    num_groups = highest + wide - first + 1
    rows = wide + 1 + bucket_rows(columns)
    group = np.empty((len(runs), rows), np.int64)
    group[:, : wide + 1] = (diagonal - first)[:, None] + np.arange(wide + 1)
    group[:, wide + 1 :] = num_groups + np.arange(bucket_rows(columns))
    members, begins = ordered(group.ravel(), num_groups + bucket_rows(columns))
    counts = -(-np.diff(begins) // CHUNK)
    ends = np.cumsum(counts)
    of, number = group_index(counts)
    starts = begins[of] + CHUNK * number
    return BiasPlan(
        runs=torch.from_numpy(runs),
        part_runs=edges[::span].tolist(),
        first_group=first,
        num_groups=num_groups,
        num_chunks=int(ends[num_groups - 1]),
        chunks=_step(members, np.append(starts, group.size)),
        groups=_step(np.arange(len(of)), np.append(0, ends)),
    )


def padded_plan(lists: tuple[Tensor, ...], *, columns: int) -> BiasPlan:
    """The plan of a padded batch, of one part, from its lists (`fills.ListFiller`)."""
    runs, members, chunk_starts, chunks, group_starts = lists
    num_groups = len(group_starts) - 1 - bucket_rows(columns)
    return BiasPlan(
        runs=runs,
        part_runs=[0, len(runs)],
        first_group=0,
        num_groups=num_groups,
        num_chunks=-(-2 * len(runs) // CHUNK) + num_groups,
        chunks=SumStep(members, chunk_starts),
        groups=SumStep(chunks, group_starts),
    )


def _step(order: Ints, starts: Ints) -> SumStep:
    return SumStep(torch.from_numpy(order), torch.from_numpy(starts))
