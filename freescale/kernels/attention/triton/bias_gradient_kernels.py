"""Triton kernels that spread score gradients over the position and the time table, in sums of fixed order.

Both tables are shared by all heads, so score gradients are summed over heads first. `table_gradient_kernel` works them
out again, where they would take too much room to keep; where they were kept, see `kept_scores`.
Rows of sums are added up as `BiasPlan` says; every program has rows of its own.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.triton.tiles import (
    TILE_FIELDS,
    read_bias,
    read_rows,
    visible,
    weights_and_slope,
)

NUM_BUCKETS = tl.constexpr(256)


@triton.jit
def add_by_bucket(sums, total, bucket, low, high):
    """`sums`, one for each bucket, and a tile: buckets change slowly along a row, so few masked sums do it."""
    index = tl.arange(0, NUM_BUCKETS)
    for b in range(low, high + 1):
        sums = tl.where(index == b, sums + tl.sum(tl.where(bucket == b, total, 0.0)), sums)
    return sums


@triton.jit
def write_by_bucket(Sums, run, sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BUCKET_ROWS: tl.constexpr):
    """Sums by bucket, behind those by distance."""
    wide: tl.constexpr = ROWS // COLUMNS
    index = tl.arange(0, NUM_BUCKETS)
    at = (run * (wide + 1 + BUCKET_ROWS) + wide + 1) * COLUMNS + index
    tl.store(Sums + at, sums, mask=index < BUCKET_ROWS * COLUMNS)


@triton.jit
def write_by_distance(Sums, run, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BUCKET_ROWS: tl.constexpr):
    """Sums along the diagonals of a tile, in ROWS / COLUMNS + 1 rows; distances rise inside a row and from row to row.

    Turning each row of the tile by its number puts a diagonal into one column, or two or more: one for each row of
    sums. Number n of row g is that of distance (g - 1) * COLUMNS + 1 + n where first row and column are at one place.
    """
    wide: tl.constexpr = ROWS // COLUMNS
    columns = tl.arange(0, COLUMNS)
    turned = tl.arange(0, ROWS)[:, None] + columns[None, :]
    x = tl.gather(x, turned % COLUMNS, 1)
    for group in tl.static_range(wide + 1):
        at = (run * (wide + 1 + BUCKET_ROWS) + group + 1) * COLUMNS - 1 - columns
        tl.store(Sums + at, tl.sum(tl.where(turned // COLUMNS == group, x, 0.0), 0))


@triton.jit
def at_one_position(x, i0, j0, events, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile with all its targets at the first position after the events, as `plan.bias.diagonals` counts tiles.

    Rows from `events` on are added up into the row, and columns into the column, that stands there: in this tile, or in
    the earlier one in which the events end.
    """
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    row = events - tl.minimum(i0, events // BLOCK_M * BLOCK_M)
    column = events - tl.minimum(j0, events // BLOCK_N * BLOCK_N)
    is_target = (i0 + rows >= events)[:, None]
    of_rows = tl.sum(tl.where(is_target, x, 0.0), 0)
    x = tl.where(is_target, 0.0, x)
    x = tl.where((rows == row)[:, None], of_rows[None, :], x)
    is_target = (j0 + columns >= events)[None, :]
    of_columns = tl.sum(tl.where(is_target, x, 0.0), 1)
    x = tl.where(is_target, 0.0, x)
    return tl.where((columns == column)[None, :], of_columns[:, None], x)


@triton.jit
def table_gradient_kernel(
    Q, K, V, DO, Sums, Buckets, Visibility, Bias, Runs,
    q_row, k_row, v_row, do_row, q_head, k_head, v_head, do_head,
    num_heads, half_alpha, window, prefix: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SQUARE: tl.constexpr, LISTED: tl.constexpr, VISIBILITY: tl.constexpr, TARGETS: tl.constexpr,
    FAST: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, BUCKET_ROWS: tl.constexpr,
):  # fmt: skip
    """What one pair of tiles gives to the tables; its score gradients are worked out again and never stored."""
    run = tl.program_id(0).to(tl.int64)
    start = tl.load(Runs + run * TILE_FIELDS)
    length = tl.load(Runs + run * TILE_FIELDS + 1).to(tl.int32)
    i0 = tl.load(Runs + run * TILE_FIELDS + 2).to(tl.int32) * BLOCK_M
    j0 = tl.load(Runs + run * TILE_FIELDS + 3).to(tl.int32) * BLOCK_N
    history = tl.load(Runs + run * TILE_FIELDS + 6).to(tl.int32)
    store0 = tl.load(Runs + run * TILE_FIELDS + 7)
    i = i0 + tl.arange(0, BLOCK_M)
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
    seen = visible(
        i0,
        j0,
        Visibility,
        start,
        length,
        history,
        window,
        prefix,
        BLOCK_M,
        BLOCK_N,
        LISTED,
        VISIBILITY,
        False,
    )
    seen = seen & (i[:, None] < length)
    total = tl.where(seen, total, 0.0)
    if HAS_TIME:
        bucket = read_bias(Buckets, store0, length, i0, j0, BLOCK_M, BLOCK_N, SQUARE).to(tl.int32)
        low = tl.min(tl.where(seen, bucket, NUM_BUCKETS))
        high = tl.max(tl.where(seen, bucket, -1))
        sums = add_by_bucket(tl.zeros([NUM_BUCKETS], ACC), total, bucket, low, high)
        write_by_bucket(Sums, run, sums, BLOCK_M, BLOCK_N, BUCKET_ROWS)
    if HAS_POSITION:
        if TARGETS and i0 + BLOCK_M > history:
            total = at_one_position(total, i0, j0, history, BLOCK_M, BLOCK_N)
        write_by_distance(Sums, run, total, BLOCK_M, BLOCK_N, BUCKET_ROWS)


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
