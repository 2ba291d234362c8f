"""The id kernels on a GPU. Import this module where it is used: it needs triton.

A batch of new ids must end up as if the smallest had come first, and threads come in any order. So an id that meets a
larger one that came in the same batch takes its slot by compare-and-swap, and the larger one is carried on from there.
In a slot that was empty before the batch, ids only ever get smaller: whoever comes when, the end is the same. Ids that
were there before never move: their bits in `occupied` are set.

Slots are read in aligned groups: a group of four is one sector of memory, which costs as much as a single slot.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from freescale.kernels.id_table import layout as slot_layout
from freescale.kernels.id_table.layout import SlotLayout
from freescale.kernels.id_table.triton.touch import mark

EMPTY = tl.constexpr(slot_layout.EMPTY)
GOLDEN = tl.constexpr(slot_layout.GOLDEN)
MIX_1 = tl.constexpr(slot_layout.MIX_1)
MIX_2 = tl.constexpr(slot_layout.MIX_2)
LAST = tl.constexpr(torch.iinfo(torch.int64).max)
LAST_BATCH = tl.constexpr(torch.iinfo(torch.int32).max)


@dataclass(frozen=True)
class Tiles:
    """Shape of a launch: ids a program, slots read at once (1, 2, 4 or 8), warps a program."""

    block: int
    group: int
    warps: int


# A program goes on until its last id is done, so small ones win. Best of 36 shapes on an H200, 2^26 rows, load 0.75.
FIND = Tiles(block=32, group=2, warps=1)
CLAIM = Tiles(block=32, group=1, warps=1)


@triton.jit
def _place(ids, num_buckets, bucket_rows, bucket_slots, first_bucket, held_buckets):
    """First row of each id's bucket, its home slot there, and whether the bucket is held here."""
    x = ids.to(tl.uint64, bitcast=True) + GOLDEN
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    x = x ^ (x >> 31)
    bucket = (((x >> 32) * num_buckets) >> 32).to(tl.int64) - first_bucket
    home = (((x & 0xFFFFFFFF) * bucket_slots) >> 32).to(tl.int64)
    here = (bucket >= 0) & (bucket < held_buckets) & (ids != EMPTY)
    return bucket * bucket_rows, home, here


@triton.jit
def _search(ids, base, home, active, identity, bucket_slots, max_probe, GROUP: tl.constexpr):
    """Row of each active id, or -1: groups of slots until the id, an empty slot or the end of the window."""
    rows = tl.where(active, -1, -1).to(tl.int64)
    first = home // GROUP * GROUP
    depth = first - home
    while tl.max(active.to(tl.int32), 0) > 0:
        done = active == 0
        for step in tl.static_range(GROUP):
            inside = active & (depth + step >= 0) & (depth + step < max_probe)
            keys = tl.load(identity + base + first + step, mask=inside, other=0)
            found = inside & (keys == ids)
            rows = tl.where(found, base + first + step, rows)
            done = done | found | (inside & (keys == EMPTY))
        depth += GROUP
        first += GROUP
        first = tl.where(first >= bucket_slots, 0, first)
        active = active & (done == 0) & (depth < max_probe)
    return rows


@triton.jit
def _find_kernel(
    ids_ptr, identity, rows_ptr, count, num_buckets, bucket_rows, bucket_slots, max_probe, first_bucket, held_buckets,
    marks,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, MARK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + n, mask=n < count, other=EMPTY)
    base, home, here = _place(ids, num_buckets, bucket_rows, bucket_slots, first_bucket, held_buckets)
    rows = _search(ids, base, home, here, identity, bucket_slots, max_probe, GROUP)
    tl.store(rows_ptr + n, rows, mask=n < count)
    if MARK:
        mark(marks, rows, rows >= 0)


@triton.jit
def _claim_kernel(
    ids_ptr, identity, occupied, rows_ptr, count,
    num_buckets, bucket_rows, bucket_slots, max_probe, first_bucket, held_buckets,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows of ids that were there; -2 - row for a new one, which another program may still carry on; -1 for none."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + n, mask=n < count, other=EMPTY)
    base, home, active = _place(ids, num_buckets, bucket_rows, bucket_slots, first_bucket, held_buckets)
    # A swap has no mask: those with nothing to swap do it with their own place in the output, which holds -1.
    spare = rows_ptr + tl.minimum(n, count - 1)
    rows = tl.where(active, -1, -1).to(tl.int64)
    moving, mine = ids, active
    first = home // GROUP * GROUP
    depth = first - home
    while tl.max(active.to(tl.int32), 0) > 0:
        searching = active
        wants = active & (moving == EMPTY)
        target = base
        expected = ids
        while tl.max(searching.to(tl.int32), 0) > 0:
            decided = searching == 0
            for step in tl.static_range(GROUP):
                row = base + first + step
                inside = searching & (depth + step >= 0) & (depth + step < max_probe)
                # Past the first-level cache, which knows nothing of the swaps of other programs.
                keys = tl.load(identity + row, mask=inside, other=0, cache_modifier=".cg")
                inside = inside & (decided == 0)
                same = inside & (keys == moving)
                empty = inside & (keys == EMPTY)
                larger = inside & (keys != EMPTY) & (keys > moving)
                word = tl.load(occupied + (row >> 5), mask=larger | (same & mine), other=-1)
                stays = ((word >> (row & 31).to(tl.int32)) & 1) == 1
                rows = tl.where(same & mine, tl.where(stays, row, -2 - row), rows)
                opens = empty | (larger & (stays == 0))
                expected = tl.where(opens, keys, expected)
                target = tl.where(opens, row, target)
                wants = wants | opens
                decided = decided | same | opens
                active = active & (same == 0)
            searching = searching & (decided == 0)
            depth = tl.where(searching, depth + GROUP, depth)
            first = tl.where(searching, first + GROUP, first)
            first = tl.where(first >= bucket_slots, 0, first)
            active = active & ((searching == 0) | (depth < max_probe))
            searching = searching & (depth < max_probe)
        place = tl.where(wants, identity + target, spare)
        # Each slot stands for itself, and a swap that comes too late is tried again: no order among them is needed.
        old = tl.atomic_cas(place, tl.where(wants, expected, -1), tl.where(wants, moving, -1), sem="relaxed")
        won = wants & (old == expected)
        rows = tl.where(won & mine, -2 - target, rows)
        carries = won & (expected != EMPTY)
        active = active & ((won == 0) | carries)
        # Carry the larger id on, from the slot it has lost.
        mine = mine & (won == 0)
        moving = tl.where(carries, expected, moving)
        _, new_home, _ = _place(moving, num_buckets, bucket_rows, bucket_slots, first_bucket, held_buckets)
        lost = target - base
        behind = tl.where(lost >= new_home, lost - new_home, lost - new_home + bucket_slots)
        depth = tl.where(carries, behind - (lost - first), depth)
    tl.store(rows_ptr + n, rows, mask=n < count)


@triton.jit
def _settle_kernel(
    ids_ptr, identity, occupied, rows_ptr, new_ptr, count,
    num_buckets, bucket_rows, bucket_slots, max_probe, first_bucket, held_buckets,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Final rows; new_ptr[n] says that ids[n] is the one that tells of a new row."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + n, mask=n < count, other=EMPTY)
    rows = tl.load(rows_ptr + n, mask=n < count, other=-1)
    new = rows < -1
    rows = tl.where(new, -2 - rows, rows)
    moved = new & (tl.load(identity + rows, mask=new, other=EMPTY) != ids)
    base, home, here = _place(ids, num_buckets, bucket_rows, bucket_slots, first_bucket, held_buckets)
    again = _search(ids, base, home, moved & here, identity, bucket_slots, max_probe, GROUP)
    rows = tl.where(moved, again, rows)
    new = new & (rows >= 0)
    bit = (tl.full([BLOCK], 1, tl.int64) << (rows & 31)).to(tl.int32)
    before = tl.atomic_or(occupied + (rows >> 5), bit, mask=new, sem="relaxed")
    tl.store(new_ptr + n, (new & ((before & bit) == 0)).to(tl.int8), mask=n < count)
    tl.store(rows_ptr + n, rows, mask=n < count)


@triton.jit
def _evict_kernel(
    ids_ptr, starts, identity, used, score, rows_ptr, gone_ptr,
    num_buckets, bucket_rows, bucket_slots, max_probe, first_bucket, held_buckets,
    now, safe_from, threshold, blank,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """One program a bucket goes through its ids, smallest first, a whole window at once."""
    n = tl.load(starts + tl.program_id(0))
    end = tl.load(starts + tl.program_id(0) + 1)
    lane = tl.arange(0, WINDOW)
    while n < end:
        id_ = tl.load(ids_ptr + n)
        base, home, here = _place(id_, num_buckets, bucket_rows, bucket_slots, first_bucket, held_buckets)
        place = home + lane
        place = tl.where(place >= bucket_slots, place - bucket_slots, place)
        inside = lane < tl.where(here, max_probe, 0)
        scores = tl.load(score + base + place, mask=inside, other=LAST, volatile=True)
        last_use = tl.load(used + base + place, mask=inside, other=LAST_BATCH, volatile=True)
        free = inside & (last_use < safe_from) & (scores < threshold)
        lowest = tl.min(tl.where(free, scores, LAST), 0)
        best = tl.min(tl.where(free & (scores == lowest), lane, WINDOW), 0)
        taken = best < WINDOW
        slot = home + best
        row = base + tl.where(slot >= bucket_slots, slot - bucket_slots, slot)
        gone = tl.load(identity + row, mask=taken, other=EMPTY, volatile=True)
        tl.store(rows_ptr + n, tl.where(taken, row, -1))
        tl.store(gone_ptr + n, gone)
        tl.debug_barrier()
        tl.store(identity + row, id_, mask=taken)
        tl.store(used + row, now, mask=taken)
        tl.store(score + row, blank, mask=taken)
        # The next id must see what this one has done.
        tl.debug_barrier()
        n += 1


def find(
    ids: Tensor, identity: Tensor, layout: SlotLayout, *, marks: Tensor | None = None, tiles: Tiles = FIND
) -> Tensor:
    """Row of every id, -1 where it has none; `marks` (`no_marks`) gets the bits of the rows found."""
    rows = torch.empty_like(ids)
    if len(ids):
        _find_kernel[_grid(len(ids), tiles)](
            ids, identity, rows, len(ids), *layout.numbers, identity if marks is None else marks,
            BLOCK=tiles.block, GROUP=tiles.group, MARK=marks is not None, num_warps=tiles.warps,
        )  # fmt: skip
    return rows


def claim(
    ids: Tensor, identity: Tensor, occupied: Tensor, layout: SlotLayout, *, tiles: Tiles = CLAIM
) -> tuple[Tensor, Tensor]:
    """Rows of all ids, -1 where the window is full, and a mark at one id for each row that was empty before."""
    rows, new = torch.full_like(ids, -1), torch.empty_like(ids, dtype=torch.bool)
    launch_claim(ids, identity, occupied, rows, new.view(torch.int8), layout, tiles)
    return rows, new


def launch_claim(
    ids: Tensor,
    identity: Tensor,
    occupied: Tensor,
    rows: Tensor,
    new: Tensor,
    layout: SlotLayout,
    tiles: Tiles,
) -> None:
    """The kernels of `claim` alone: `rows` comes in as -1, `new` marks one id for each row that was empty."""
    if len(ids):
        numbers, shape = (
            layout.numbers,
            {"BLOCK": tiles.block, "GROUP": tiles.group, "num_warps": tiles.warps},
        )
        _claim_kernel[_grid(len(ids), tiles)](ids, identity, occupied, rows, len(ids), *numbers, **shape)
        _settle_kernel[_grid(len(ids), tiles)](
            ids, identity, occupied, rows, new, len(ids), *numbers, **shape
        )


def evict(
    ids: Tensor,
    identity: Tensor,
    used: Tensor,
    score: Tensor,
    layout: SlotLayout,
    now: int,
    safe_from: int,
    threshold: int,
    blank: int,
) -> tuple[Tensor, Tensor]:
    """The row each of these distinct ids took over, or -1, and who had it; smallest id first in every bucket."""
    rows = torch.full_like(ids, -1)
    gone = torch.full_like(ids, slot_layout.EMPTY)
    if len(ids) == 0 or layout.held_buckets == 0:
        return rows, gone
    ids, order = ids.sort()
    bucket, by_bucket = (layout.bucket(ids) - layout.first_bucket).sort(stable=True)
    order = order[by_bucket]
    starts = torch.searchsorted(bucket, torch.arange(layout.held_buckets + 1, device=ids.device))
    # Ids of buckets held elsewhere are in no program's part.
    taken, had = rows.clone(), gone.clone()
    _evict_kernel[(layout.held_buckets,)](
        ids[by_bucket], starts, identity, used, score, taken, had, *layout.numbers,
        now, safe_from, threshold, blank,
        WINDOW=triton.next_power_of_2(layout.max_probe), num_warps=4,
    )  # fmt: skip
    rows[order], gone[order] = taken, had
    return rows, gone


def _grid(count: int, tiles: Tiles) -> tuple[int]:
    return (triton.cdiv(count, tiles.block),)
