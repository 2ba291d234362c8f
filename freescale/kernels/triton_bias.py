"""Triton kernels of the relative bias: time buckets, the bias of every pair, and the gradients of both tables.

The bias of a pair does not depend on the head. So it is worked out once a layer into a `BiasStore` (half precision for
half-precision inputs) that all heads read like one more operand, and its gradient is summed over heads before it is
spread over the tables, in sums of fixed order. Buckets depend on the batch alone and serve every layer.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.triton_tiles import (
    BIAS_ROWS,
    TILE_FIELDS,
    bias_rows,
    read_bias,
    read_rows,
    visible,
    weights_and_slope,
)

NUM_BUCKETS = tl.constexpr(256)


@triton.jit
def own_block(Rows, Blocks):
    """Of this program's block: start and length of its sequence, first row, where its numbers lie, width."""
    block = tl.program_id(0)
    start = tl.load(Rows + block * 3)
    # Inside a block 32 bits are enough, and twice as fast.
    length = tl.load(Rows + block * 3 + 1).to(tl.int32)
    first = tl.load(Rows + block * 3 + 2).to(tl.int32)
    offset = tl.load(Blocks + block * 2)
    width = tl.load(Blocks + block * 2 + 1).to(tl.int32)
    return start, length, first, offset, width


@triton.jit
def bucket_kernel(
    QueryTime, KeyTime, Buckets, Rows, Blocks, Edges, log2_to_bucket, top_bucket,
    ROWS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Time bucket of every pair of a piece of a block.

    A float32 logarithm is at most one bucket off; the edges of the buckets, whole numbers, put that right.
    """
    start, length, first, offset, width = own_block(Rows, Blocks)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(2) * STRIP + tl.arange(0, STRIP)
    if tl.program_id(2) * STRIP < width:
        asked = tl.load(QueryTime + start + tl.minimum(first + row, length - 1))
        happened = tl.load(KeyTime + start + tl.minimum(j, length - 1))
        gap = tl.maximum(tl.abs(asked[:, None] - happened[None, :]), 1)
        guess = (tl.log2(gap.to(tl.float32)) * log2_to_bucket).to(tl.int32)
        guess = tl.maximum(tl.minimum(guess, top_bucket), 0)
        too_high = (gap < tl.load(Edges + guess)).to(tl.int32)
        too_low = (gap >= tl.load(Edges + guess + 1)).to(tl.int32)
        bucket = guess - too_high + too_low
        tl.store(Buckets + offset + row[:, None] * width + j[None, :], bucket.to(tl.uint8))


@triton.jit
def bias_kernel(
    Bias, Buckets, Position, Time, Rows, Blocks, last_place, factor,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Bias of every pair of a piece of a block, times `factor`: its position weight and its time weight."""
    _, _, first, offset, width = own_block(Rows, Blocks)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(2) * STRIP + tl.arange(0, STRIP)
    if tl.program_id(2) * STRIP < width:
        at = row[:, None] * width + j[None, :]
        value = tl.zeros([ROWS, STRIP], Position.dtype.element_ty)
        if HAS_POSITION:
            distance = first + row[:, None] - j[None, :]
            value += tl.load(Position + tl.minimum(tl.maximum(distance, 0), last_place))
        if HAS_TIME:
            value += tl.load(Time + tl.load(Buckets + offset + at).to(tl.int32))
        tl.store(Bias + offset + at, (value * factor).to(Bias.dtype.element_ty))


@triton.jit
def score_gradient_kernel(
    Q, K, V, DO, Gradient, Codes, Bias, Tiles,
    q_row, k_row, v_row, do_row, q_head, k_head, v_head, do_head,
    num_heads, half_alpha, window, prefix,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SQUARE: tl.constexpr, LISTED: tl.constexpr, SEGMENTS: tl.constexpr,
    FAST: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradient of the scores of one pair of tiles, summed over heads: the gradient of the bias, pair by pair."""
    tile = tl.program_id(0)
    start = tl.load(Tiles + tile * TILE_FIELDS)
    length = tl.load(Tiles + tile * TILE_FIELDS + 1).to(tl.int32)
    i0 = tl.load(Tiles + tile * TILE_FIELDS + 2).to(tl.int32) * BLOCK_M
    j0 = tl.load(Tiles + tile * TILE_FIELDS + 3).to(tl.int32) * BLOCK_N
    heads = tl.load(Tiles + tile * TILE_FIELDS + 4).to(tl.int32) * num_heads
    history = tl.load(Tiles + tile * TILE_FIELDS + 6).to(tl.int32)
    store0 = tl.load(Tiles + tile * TILE_FIELDS + 7)
    i = i0 + tl.arange(0, BLOCK_M)
    j = j0 + tl.arange(0, BLOCK_N)
    bias = read_bias(Bias, store0, length, i0, j0, BLOCK_M, BLOCK_N, SQUARE).to(ACC)
    seen = visible(i[:, None], j[None, :], Codes, start, length, history, window, prefix, LISTED, SEGMENTS)
    total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for head in tl.range(0, heads, num_stages=STAGES):
        q = read_rows(Q, start, i0, head, q_row, q_head, length, WIDTH, BLOCK_D, BLOCK_M, False, TMA)
        k = read_rows(K, start, j0, head, k_row, k_head, length, WIDTH, BLOCK_D, BLOCK_N, False, TMA)
        v = read_rows(V, start, j0, head, v_row, v_head, length, V_WIDTH, BLOCK_V, BLOCK_N, False, TMA)
        do = read_rows(DO, start, i0, head, do_row, do_head, length, V_WIDTH, BLOCK_V, BLOCK_M, False, TMA)
        h = (tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC) + bias) * half_alpha
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
        _, ds = weights_and_slope(h, dp, i, i, seen, False, FAST, False)
        total += ds
    total = tl.where(seen, total, 0.0)
    offset, width = bias_rows(store0, length, i0, SQUARE)
    at = Gradient + offset + (i0 % BIAS_ROWS + tl.arange(0, BLOCK_M))[:, None] * width + j[None, :]
    tl.store(at, total.to(Gradient.dtype.element_ty))


@triton.jit
def position_gradient_kernel(
    Gradient, Sums, Rows, Blocks, num_distances, AHEAD: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr
):  # fmt: skip
    """Sums over a block of rows for a strip of distances, read along the diagonals; what lies AHEAD has distance 0."""
    _, _, first, offset, width = own_block(Rows, Blocks)
    Gradient += offset
    # Distances fall from left to right, so that columns rise: a warp reads numbers that lie side by side.
    distance = (tl.program_id(1) + 1) * STRIP - 1 - tl.arange(0, STRIP)
    by_row = tl.zeros([ROWS, STRIP], Sums.dtype.element_ty)
    if tl.program_id(1) * STRIP < first + BIAS_ROWS:
        for r0 in range(0, BIAS_ROWS, ROWS):
            row = r0 + tl.arange(0, ROWS)
            j = first + row[:, None] - distance[None, :]
            x = tl.load(Gradient + row[:, None] * width + j, mask=j >= 0, other=0.0)
            by_row += x.to(Sums.dtype.element_ty)
    total = tl.sum(by_row, 0)
    if AHEAD and tl.program_id(1) == 0:
        ahead = tl.zeros([STRIP], Sums.dtype.element_ty)
        for row in range(0, BIAS_ROWS):
            for j0 in range(first // STRIP * STRIP, width, STRIP):
                j = j0 + tl.arange(0, STRIP)
                x = tl.load(Gradient + row * width + j, mask=j > first + row, other=0.0)
                ahead += x.to(Sums.dtype.element_ty)
        total += tl.where(distance == 0, tl.sum(ahead), 0.0)
    tl.store(
        Sums + tl.program_id(0).to(tl.int64) * num_distances + distance, total, mask=distance < num_distances
    )


@triton.jit
def time_gradient_kernel(
    Gradient, Buckets, Sums, Blocks, ROWS: tl.constexpr, STRIP: tl.constexpr, STRIPS: tl.constexpr
):  # fmt: skip
    """Sums by bucket over a piece of a block, one warp and one row of `Sums` for each, zero before.

    Buckets along a row change in steps, few in a small tile: one masked sum for each, added by the one warp in order.
    """
    block = tl.program_id(0)
    offset = tl.load(Blocks + block * 2)
    width = tl.load(Blocks + block * 2 + 1).to(tl.int32)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(2) * STRIP * STRIPS
    program = (block * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    Sums += program.to(tl.int64) * NUM_BUCKETS
    for j0 in range(first, tl.minimum(first + STRIP * STRIPS, width), STRIP):
        at = row[:, None] * width + (j0 + tl.arange(0, STRIP))[None, :]
        x = tl.load(Gradient + offset + at).to(Sums.dtype.element_ty)
        bucket = tl.load(Buckets + offset + at).to(tl.int32)
        used = x != 0
        low = tl.min(tl.where(used, bucket, NUM_BUCKETS))
        high = tl.max(tl.where(used, bucket, -1))
        for b in range(low, high + 1):
            tl.atomic_add(Sums + b, tl.sum(tl.where(bucket == b, x, 0.0)), sem="relaxed")
