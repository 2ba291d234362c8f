"""Triton kernels of the relative bias: time buckets, the bias of every pair, and the gradients of both tables.

The bias of a pair does not depend on the head. So it is worked out once a layer into a `BiasStore` (half precision for
half-precision inputs) that all heads read like one more operand. Its gradient is summed over heads in registers and
spread over the tables tile by tile, in sums of fixed order. Buckets depend on the batch alone and serve every layer.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.triton_tiles import (
    TILE_FIELDS,
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
def is_read(Seen, width, STRIP: tl.constexpr, MASKED: tl.constexpr):
    """Whether any kernel reads this program's piece: it lies in the store, and a mask shows something of it."""
    read = tl.program_id(2) * STRIP < width
    if MASKED:
        read &= tl.load(Seen + tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)) != 0
    return read


@triton.jit
def bucket_kernel(
    QueryTime, KeyTime, Buckets, Rows, Blocks, Seen, Edges, log2_to_bucket, top_bucket,
    MASKED: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Time bucket of every pair of a piece of a block.

    A float32 logarithm is at most one bucket off; the edges of the buckets, whole numbers, put that right.
    """
    start, length, first, offset, width = own_block(Rows, Blocks)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(2) * STRIP + tl.arange(0, STRIP)
    if is_read(Seen, width, STRIP, MASKED):
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
    Bias, Buckets, Position, Time, Rows, Blocks, Seen, last_place, factor,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Bias of every pair of a piece of a block, times `factor`: its position weight and its time weight."""
    _, _, first, offset, width = own_block(Rows, Blocks)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(2) * STRIP + tl.arange(0, STRIP)
    if is_read(Seen, width, STRIP, MASKED):
        at = row[:, None] * width + j[None, :]
        value = tl.zeros([ROWS, STRIP], Position.dtype.element_ty)
        if HAS_POSITION:
            distance = first + row[:, None] - j[None, :]
            value += tl.load(Position + tl.minimum(tl.maximum(distance, 0), last_place))
        if HAS_TIME:
            value += tl.load(Time + tl.load(Buckets + offset + at).to(tl.int32))
        tl.store(Bias + offset + at, (value * factor).to(Bias.dtype.element_ty))


@triton.jit
def by_distance(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """[COLUMNS] sums along the diagonals of a tile; number n is that of distance GROUP * COLUMNS - n.

    Distances are those of the first row and column being at the same place. Turning each row by its number puts a
    diagonal into two columns or more, one for each GROUP from 0 to ROWS / COLUMNS.
    """
    row = tl.arange(0, ROWS)[:, None]
    turned = row + tl.arange(0, COLUMNS)[None, :]
    return tl.sum(tl.where(turned // COLUMNS == GROUP, x, 0.0), 0)


@triton.jit
def table_gradient_kernel(
    Q, K, V, DO, ByDistance, ByBucket, Buckets, Codes, Bias, Tiles,
    q_row, k_row, v_row, do_row, q_head, k_head, v_head, do_head,
    num_heads, half_alpha, window, prefix,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SQUARE: tl.constexpr, LISTED: tl.constexpr, SEGMENTS: tl.constexpr,
    FAST: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr,
):  # fmt: skip
    """What one pair of tiles gives to the tables: its score gradients, summed over heads, by distance and by bucket.

    The score gradients themselves are never stored. Every program has rows of its own in the sums.
    """
    tile = tl.program_id(0).to(tl.int64)
    start = tl.load(Tiles + tile * TILE_FIELDS)
    length = tl.load(Tiles + tile * TILE_FIELDS + 1).to(tl.int32)
    i0 = tl.load(Tiles + tile * TILE_FIELDS + 2).to(tl.int32) * BLOCK_M
    j0 = tl.load(Tiles + tile * TILE_FIELDS + 3).to(tl.int32) * BLOCK_N
    history = tl.load(Tiles + tile * TILE_FIELDS + 6).to(tl.int32)
    store0 = tl.load(Tiles + tile * TILE_FIELDS + 7)
    i = i0 + tl.arange(0, BLOCK_M)
    j = j0 + tl.arange(0, BLOCK_N)
    bias = read_bias(Bias, store0, length, i0, j0, BLOCK_M, BLOCK_N, SQUARE).to(ACC)
    total = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for head in tl.range(0, num_heads, num_stages=STAGES):
        q = read_rows(Q, start, i0, head, q_row, q_head, length, WIDTH, BLOCK_D, BLOCK_M, False, TMA)
        k = read_rows(K, start, j0, head, k_row, k_head, length, WIDTH, BLOCK_D, BLOCK_N, False, TMA)
        v = read_rows(V, start, j0, head, v_row, v_head, length, V_WIDTH, BLOCK_V, BLOCK_N, False, TMA)
        do = read_rows(DO, start, i0, head, do_row, do_head, length, V_WIDTH, BLOCK_V, BLOCK_M, False, TMA)
        h = (tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC) + bias) * half_alpha
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
        _, ds = weights_and_slope(h, dp, i, i, i, False, FAST, False)
        total += ds
    seen = visible(i[:, None], j[None, :], Codes, start, length, history, window, prefix, LISTED, SEGMENTS)
    total = tl.where(seen, total, 0.0)
    if HAS_TIME:
        # Buckets change slowly along a row, so that a tile holds few of them: one masked sum for each.
        bucket = read_bias(Buckets, store0, length, i0, j0, BLOCK_M, BLOCK_N, SQUARE).to(tl.int32)
        low = tl.min(tl.where(seen, bucket, NUM_BUCKETS))
        high = tl.max(tl.where(seen, bucket, -1))
        places = tl.arange(0, NUM_BUCKETS)
        sums = tl.zeros([NUM_BUCKETS], ACC)
        for b in range(low, high + 1):
            sums = tl.where(places == b, tl.sum(tl.where(bucket == b, total, 0.0)), sums)
        tl.store(ByBucket + tile * NUM_BUCKETS + places, sums)
    if HAS_POSITION:
        columns = tl.arange(0, BLOCK_N)
        turned = (tl.arange(0, BLOCK_M)[:, None] + columns[None, :]) % BLOCK_N
        total = tl.gather(total, turned, 1)
        for group in tl.static_range(BLOCK_M // BLOCK_N + 1):
            at = (tile * (BLOCK_M // BLOCK_N + 1) + group) * BLOCK_N + columns
            tl.store(ByDistance + at, by_distance(total, BLOCK_M, BLOCK_N, group))


@triton.jit
def group_sum_kernel(X, Order, Starts, Out, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Sum of the rows of X that belong to one group; `Order` lists the rows group by group."""
    begin = tl.load(Starts + tl.program_id(0))
    end = tl.load(Starts + tl.program_id(0) + 1)
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], Out.dtype.element_ty)
    for first in range(begin, end, ROWS):
        place = first + tl.arange(0, ROWS)
        row = tl.load(Order + place, mask=place < end, other=0)
        total += tl.load(
            X + row[:, None] * COLUMNS + columns[None, :], mask=(place < end)[:, None], other=0.0
        )
    tl.store(Out + tl.program_id(0) * COLUMNS + columns, tl.sum(total, 0))
