"""The relative bias of every pair on the GPU: buckets once a batch, bias once a layer, gradients of both tables."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.kernels.attention_launch import Launch, Tile
from freescale.kernels.attention_mask import AttentionMask
from freescale.kernels.attention_work import BIAS_ROWS, AttentionWork, is_square
from freescale.kernels.reference import NUM_TIME_BUCKETS, TIME_BUCKET_WIDTH, time_bucket

# Rows and columns that a program works on at a time.
_ROWS, _STRIP = 32, 128
# Tiles of the score gradient, by the bytes of a head's row: all four operands must fit into shared memory.
_GRADIENT_TILES = {
    128: Tile(64, 64, 4, 3, True),
    256: Tile(64, 64, 4, 1, True),
    512: Tile(64, 64, 8, 1, True),
    2048: Tile(64, 32, 4, 1),
}


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
        _bucket_edges(out.device),
        math.log(2) / TIME_BUCKET_WIDTH,
        NUM_TIME_BUCKETS - 1,
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
        len(position) - 1,
        1 / launch.alpha,
        HAS_POSITION=tables.position is not None,
        HAS_TIME=tables.time is not None,
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
    of_pairs = _score_gradient(launch, pairs, grad)
    store = launch.work.bias_store(launch.mask)
    num_blocks = len(store.blocks)
    d_position = d_time = None
    if tables.position is not None:
        longest = min(len(tables.position), store.widest)
        sums = grad.new_empty(num_blocks, longest, dtype=launch.sums_dtype)
        triton_bias.position_gradient_kernel[(num_blocks, -(-longest // _STRIP))](
            of_pairs,
            sums,
            store.rows,
            store.blocks,
            longest,
            AHEAD=is_square(launch.mask),
            ROWS=_ROWS,
            STRIP=_STRIP,
        )
        d_position = torch.zeros_like(tables.position)
        d_position[:longest] = sums.sum(0) * factor
    if tables.time is not None:
        grid = (num_blocks, BIAS_ROWS // 32, -(-store.widest // 512))
        sums = grad.new_zeros(math.prod(grid), triton_bias.NUM_BUCKETS.value, dtype=launch.sums_dtype)
        triton_bias.time_gradient_kernel[grid](
            of_pairs, tables.buckets, sums, store.blocks, ROWS=32, STRIP=32, STRIPS=16, num_warps=1
        )
        d_time = (sums.sum(0)[: len(tables.time)] * factor).to(tables.time.dtype)
    return d_position, d_time


def _score_gradient(launch: Launch, pairs: Tensor, grad: Tensor) -> Tensor:
    """Gradient of every pair's score, summed over heads, in the places of the bias."""
    from freescale.kernels import triton_bias

    width = max(launch.q.shape[-1], launch.v.shape[-1])
    tile = next(of for limit, of in _GRADIENT_TILES.items() if width * launch.q.dtype.itemsize <= limit)
    out = torch.empty_like(pairs, dtype=torch.bfloat16 if pairs.dtype == torch.float16 else pairs.dtype)
    tiles = launch.work.store_tiles(rows=tile.queries, columns=tile.keys, mask=launch.mask)
    launch.start(
        triton_bias.score_gradient_kernel,
        len(tiles),
        tile,
        read={"Q": launch.q, "K": launch.k, "V": launch.v, "DO": grad},
        write={},
        more={"Gradient": out, "Bias": pairs, "Tiles": tiles},
        numbers={},
        options={},
    )
    return out


def _table(x: Tensor | None, launch: Launch) -> Tensor:
    return (
        launch.nothing.new_zeros(1, dtype=launch.sums_dtype)
        if x is None
        else x.to(launch.sums_dtype).contiguous()
    )
