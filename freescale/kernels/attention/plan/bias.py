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

from freescale.kernels.attention.mask import Ints
from freescale.kernels.attention.plan.room import LayoutRoom, padded
from freescale.kernels.attention.reference import NUM_TIME_BUCKETS
from freescale.kernels.runtime import Move

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

    def moved(self, move: Move) -> BiasPlan:
        """The same on another device."""
        arrays = [x.numpy() for x in (self.runs, *self.chunks, *self.groups)]
        runs, *steps = move(*arrays)
        return self._replace(runs=runs, chunks=SumStep(*steps[:2]), groups=SumStep(*steps[2:]))


def bucket_rows(columns: int) -> int:
    """Rows of sums that hold all buckets."""
    return -(-NUM_TIME_BUCKETS // columns)


def joined(tiles: Ints, *, limit: int) -> Ints:
    """Square tiles that follow each other on a diagonal of a sequence as one, at most `limit` of them together."""
    diagonal = tiles[:, 2] - tiles[:, 3]
    order = np.lexsort((tiles[:, 2], diagonal, tiles[:, 0]))
    tiles, diagonal = tiles[order], diagonal[order]
    index = np.arange(len(tiles))
    follows = (np.diff(tiles[:, 0]) == 0) & (np.diff(diagonal) == 0) & (np.diff(tiles[:, 2]) == 1)
    since = index - np.maximum.accumulate(np.where(np.concatenate([[False], follows]), 0, index))
    first = np.flatnonzero(since % limit == 0)
    out = tiles[first]
    out[:, 4] = np.diff(first, append=len(tiles))
    return out


def plan_bias(
    runs: Ints, part: Ints, num_parts: int, *, wide: int, columns: int, last_diagonal: int = 0
) -> BiasPlan:
    """Plan for these runs of these parts; a tile is `columns` wide and `wide` times as high.

    There are groups up to `last_diagonal` at least.
    """
    from freescale.kernels.attention.plan.tile_pair_loops import ordered

    diagonal = runs[:, 2] * wide - runs[:, 3]
    lowest, highest = int(diagonal.min(initial=0)), int(diagonal.max(initial=last_diagonal))
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
    of = np.repeat(np.arange(len(counts)), counts)
    starts = begins[of] + CHUNK * (np.arange(len(of)) - (ends - counts)[of])
    return BiasPlan(
        runs=torch.from_numpy(runs),
        part_runs=edges[::span].tolist(),
        first_group=first,
        num_groups=num_groups,
        num_chunks=int(ends[num_groups - 1]),
        chunks=_step(members, np.append(starts, group.size)),
        groups=_step(np.arange(len(of)), np.append(0, ends)),
    )


def with_room(
    plan: BiasPlan, room: LayoutRoom, *, num_sequences: int, columns: int, programs: int
) -> BiasPlan:
    """The same plan of one part in lists of fixed sizes; what is not used has no tiles, and adds nothing."""
    rows = len(plan.chunks.order) // max(1, len(plan.runs))
    most = min(room.pairs(num_sequences, columns), programs + room.tiles(num_sequences, columns))
    num_distances = plan.num_groups
    num_buckets = len(plan.groups.starts) - 1 - num_distances
    # Rows of sums by distance, two a run, then those of buckets: chunks that are full, and one more a group.
    sizes = -(-2 * most // CHUNK) + num_distances, -(-most // CHUNK) * num_buckets + num_buckets
    if rows:
        assert rows == 2 + num_buckets, "tiles of a padded batch are square"
    starts, groups = plan.chunks.starts.numpy(), plan.groups.starts.numpy()
    used, end = plan.num_chunks, len(starts) - 1
    chunk_starts = np.concatenate(
        [
            starts[:used],
            np.full(sizes[0] - used, starts[used]),
            starts[used:end],
            np.full(sizes[1] - (end - used) + 1, starts[end]),
        ]
    )
    group_starts = groups.copy()
    group_starts[num_distances:] += sizes[0] - used
    return plan._replace(
        runs=torch.from_numpy(padded(plan.runs.numpy(), most)),
        part_runs=[0, most],
        num_chunks=sizes[0],
        chunks=_step(padded(plan.chunks.order.numpy(), (2 + num_buckets) * most), chunk_starts),
        groups=_step(np.arange(sum(sizes)), group_starts),
    )


def _step(order: Ints, starts: Ints) -> SumStep:
    return SumStep(torch.from_numpy(order), torch.from_numpy(starts))
