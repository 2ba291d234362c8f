"""The relative bias of every pair on the GPU: buckets once a batch, bias once a layer, gradients of both tables."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.kernels.attention_launch import Launch, Tile
from freescale.kernels.attention_mask import AttentionMask
from freescale.kernels.attention_work import BIAS_ROWS, AttentionWork, PairTiles, is_square
from freescale.kernels.reference import NUM_TIME_BUCKETS, TIME_BUCKET_WIDTH, time_bucket

# Rows and columns that a program works on at a time.
_ROWS, _STRIP = 32, BIAS_ROWS
# Rows of partial sums added at a time.
_GROUP_ROWS = 128
# Tiles of the tables' gradients, by the bytes of a head's row: all four operands must fit into shared memory.
_HALF_TILES = {
    128: Tile(64, 64, 4, 3, True),
    256: Tile(64, 64, 4, 1, True),
    512: Tile(64, 64, 8, 1, True),
}
# Four warps, or larger tiles, spill: up to 24 KB a thread. At the widest, products in and outside the tensor cores
# need different ones.
_TF32_TILES = {256: Tile(64, 64, 8, 1), 2048: Tile(64, 32, 8, 1)}
_EXACT_TILES = {256: Tile(64, 64, 8, 1), 512: Tile(64, 32, 8, 1), 2048: Tile(32, 32, 8, 1)}


class BiasTables(NamedTuple):
    """Weights by distance, weights by time bucket, and the bucket of every pair; each may be missing."""

    position: Tensor | None
    time: Tensor | None
    buckets: Tensor | None

    def __bool__(self) -> bool:
        """Whether there is any bias."""
        return self.position is not None or self.time is not None


def time_buckets(
    work: AttentionWork, mask: AttentionMask | None, query_time: Tensor, key_time: Tensor
) -> Tensor:
    """Time bucket of every pair, in the places of the batch's `BiasStore`."""
    from freescale.kernels import triton_bias

    store = work.bias_store(mask)
    out = torch.empty(store.size, dtype=torch.uint8, device=store.blocks.device)
    triton_bias.bucket_kernel[(len(store.blocks), BIAS_ROWS // _ROWS, store.widest // _STRIP)](
        query_time.contiguous(),
        key_time.contiguous(),
        out,
        store.rows,
        store.blocks,
        work.nothing if mask is None else work.seen_pieces(mask),
        _bucket_edges(out.device),
        math.log(2) / TIME_BUCKET_WIDTH,
        NUM_TIME_BUCKETS - 1,
        MASKED=mask is not None,
        ROWS=_ROWS,
        STRIP=_STRIP,
    )
    return out


@cache
def _bucket_edges(device: torch.device) -> Tensor:
    """Smallest time difference of each bucket, as the reference counts them; the last bucket has no end."""
    buckets = torch.arange(NUM_TIME_BUCKETS)
    below, edges = torch.zeros_like(buckets), torch.full_like(buckets, 2**62)
    for _ in range(62):
        middle = (below + edges) // 2
        reached = time_bucket(middle) >= buckets
        below, edges = torch.where(reached, below, middle), torch.where(reached, middle, edges)
    edges[0] = 0
    return torch.cat([edges, torch.tensor([2**63 - 1])]).to(device)


def pair_bias(launch: Launch, tables: BiasTables) -> Tensor:
    """Bias of every pair over alpha; float16 for half-precision inputs, whose own rounding is eight times coarser."""
    from freescale.kernels import triton_bias

    if not tables:
        return launch.nothing
    store = launch.work.bias_store(launch.mask)
    dtype = torch.float16 if launch.q.dtype.itemsize == 2 else launch.q.dtype
    out = torch.empty(store.size, dtype=dtype, device=launch.q.device)
    position, time = (_table(x, launch) for x in (tables.position, tables.time))
    triton_bias.bias_kernel[(len(store.blocks), BIAS_ROWS // _ROWS, store.widest // _STRIP)](
        out,
        launch.nothing if tables.buckets is None else tables.buckets,
        position,
        time,
        store.rows,
        store.blocks,
        launch.nothing if launch.mask is None else launch.work.seen_pieces(launch.mask),
        len(position) - 1,
        1 / launch.alpha,
        HAS_POSITION=tables.position is not None,
        HAS_TIME=tables.time is not None,
        MASKED=launch.mask is not None,
        ROWS=_ROWS,
        STRIP=_STRIP,
    )
    return out


def bias_gradients(
    launch: Launch, tables: BiasTables, pairs: Tensor, grad: Tensor, *, factor: float
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the position and the time table; `factor` is what score gradients are multiplied with."""
    from freescale.kernels import triton_bias

    if not tables:
        return None, None
    width = max(launch.q.shape[-1], launch.v.shape[-1])
    itemsize = launch.q.dtype.itemsize
    single = _TF32_TILES if launch.precision == "tf32" else _EXACT_TILES
    tiles = _HALF_TILES if itemsize == 2 else single
    tile = next(of for limit, of in tiles.items() if width * itemsize <= limit)
    plan = launch.work.pair_tiles(rows=tile.queries, columns=tile.keys, mask=launch.mask)
    num_tiles, num_groups = len(plan.tiles), tile.queries // tile.keys + 1
    by_distance = by_bucket = launch.nothing
    if tables.position is not None:
        by_distance = grad.new_empty(num_tiles * num_groups, tile.keys, dtype=launch.sums_dtype)
    if tables.time is not None:
        by_bucket = grad.new_empty(num_tiles, triton_bias.NUM_BUCKETS.value, dtype=launch.sums_dtype)
    launch.start(
        triton_bias.table_gradient_kernel,
        num_tiles,
        tile,
        read={"Q": launch.q, "K": launch.k, "V": launch.v, "DO": grad},
        write={},
        more={
            "ByDistance": by_distance,
            "ByBucket": by_bucket,
            "Buckets": launch.nothing if tables.buckets is None else tables.buckets,
            "Bias": pairs,
            "Tiles": plan.tiles,
        },
        numbers={},
        options={"HAS_POSITION": tables.position is not None, "HAS_TIME": tables.time is not None},
    )
    d_position = d_time = None
    if tables.position is not None:
        d_position = _by_place(by_distance, plan, tables.position, ahead=is_square(launch.mask)) * factor
    if tables.time is not None:
        d_time = (by_bucket.sum(0)[: len(tables.time)] * factor).to(tables.time.dtype)
    return d_position, d_time


def _by_place(by_distance: Tensor, plan: PairTiles, table: Tensor, *, ahead: bool) -> Tensor:
    """Sum of what all tiles give to each distance; keys seen `ahead` of their query count as distance 0."""
    from freescale.kernels import triton_bias

    columns, num_groups = by_distance.shape[1], len(plan.starts) - 1
    sums = by_distance.new_empty(num_groups, columns)
    triton_bias.group_sum_kernel[(num_groups,)](
        by_distance, plan.order, plan.starts, sums, COLUMNS=columns, ROWS=_GROUP_ROWS, num_warps=8
    )
    # Inside a group distances fall; turned round they rise from one number to the next.
    rising = sums.flip(1).flatten()
    zero = columns - 1 - plan.first_group * columns
    out = torch.zeros_like(table)
    known = min(len(table), len(rising) - zero)
    out[:known] = rising[zero : zero + known].to(table.dtype)
    if ahead:
        out[0] += rising[:zero].sum().to(table.dtype)
    return out


def _table(x: Tensor | None, launch: Launch) -> Tensor:
    return (
        launch.nothing.new_zeros(1, dtype=launch.sums_dtype)
        if x is None
        else x.to(launch.sums_dtype).contiguous()
    )
