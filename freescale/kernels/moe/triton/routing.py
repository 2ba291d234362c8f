"""Triton kernels of `moe_routing`: a counting sort in four launches, without atomics and without a look at the host.

All integers, so any order of adding gives the same sums. Time is a few launches: 2^18 choices are 1 MB.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

EXPERTS_AT_ONCE = tl.constexpr(64)


@triton.jit(do_not_specialize=["num_choices", "num_counts"])
def count_kernel(Experts, Counts, num_choices, num_counts, NUM_EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """Counts[e, tile]: how often a tile of choices names each expert."""
    tile = tl.program_id(0)
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    chosen = tl.load(Experts + at, mask=at < num_choices, other=-1).to(tl.int32)
    for first in range(0, NUM_EXPERTS, EXPERTS_AT_ONCE):
        expert = first + tl.arange(0, EXPERTS_AT_ONCE)
        count = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
        out = Counts + expert.to(tl.int64) * num_counts + tile
        tl.store(out, count, mask=expert < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_counts"])
def scan_kernel(Counts, Totals, num_counts, BLOCK: tl.constexpr):
    """Counts[e, tile] becomes the count of the tiles before it; Totals[e] that of all."""
    expert = tl.program_id(0)
    row = Counts + expert.to(tl.int64) * num_counts
    before = expert * 0
    for first in range(0, num_counts, BLOCK):
        at = first + tl.arange(0, BLOCK)
        count = tl.load(row + at, mask=at < num_counts, other=0)
        tl.store(row + at, before + tl.cumsum(count, 0) - count, mask=at < num_counts)
        before += tl.sum(count, 0)
    tl.store(Totals + expert, before)


@triton.jit
def offsets_kernel(Totals, Offsets, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets[e]: rows of the experts before e; Offsets[E]: all rows."""
    expert = tl.arange(0, BLOCK)
    total = tl.load(Totals + expert, mask=expert < NUM_EXPERTS, other=0)
    end = tl.cumsum(total, 0)
    tl.store(Offsets + expert + 1, end, mask=expert < NUM_EXPERTS)
    tl.store(Offsets + expert, expert * 0, mask=expert < 1)


@triton.jit(do_not_specialize=["num_choices", "num_counts"])
def position_kernel(
    Experts, Counts, Tokens, Places, Offsets,
    num_choices, num_counts,
    CHOICES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A choice's place: its expert's first row, plus the tiles before, plus the same choices before it in the tile."""
    tile = tl.program_id(0)
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < num_choices
    expert = tl.load(Experts + at, mask=inside, other=-1).to(tl.int32)
    order = tl.arange(0, TILE)
    earlier = (expert[:, None] == expert[None, :]) & (order[None, :] < order[:, None])
    place = tl.sum(earlier.to(tl.int32), 1)
    place += tl.load(Offsets + expert, mask=inside, other=0)
    place += tl.load(Counts + expert.to(tl.int64) * num_counts + tile, mask=inside, other=0)
    tl.store(Tokens + place, (at // CHOICES).to(tl.int32), mask=inside)
    tl.store(Places + at, place, mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])
def tiles_kernel(
    Offsets, Tiles, num_tiles,
    NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Tiles[t]: expert, first row, end of the expert's rows; -1 for the expert where there is no such tile."""
    expert = tl.arange(0, BLOCK)
    inside = expert < NUM_EXPERTS
    start = tl.load(Offsets + expert, mask=inside, other=0)
    stop = tl.load(Offsets + expert + 1, mask=inside, other=0)
    needed = (stop - start + TILE - 1) // TILE
    end = tl.cumsum(needed, 0)
    tile = tl.program_id(0) * LIST + tl.arange(0, LIST)
    mine = (tile[:, None] >= (end - needed)[None, :]) & (tile[:, None] < end[None, :])
    found = tl.sum(mine.to(tl.int32), 1) > 0
    own = tl.sum(tl.where(mine, expert[None, :], 0), 1)
    first = tl.sum(tl.where(mine, start[None, :] + (tile[:, None] - (end - needed)[None, :]) * TILE, 0), 1)
    last = tl.sum(tl.where(mine, stop[None, :], 0), 1)
    listed = tile < num_tiles
    tl.store(Tiles + tile * 3, tl.where(found, own, -1), mask=listed)
    tl.store(Tiles + tile * 3 + 1, first, mask=listed)
    tl.store(Tiles + tile * 3 + 2, last, mask=listed)
