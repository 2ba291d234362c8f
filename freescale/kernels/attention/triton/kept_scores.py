"""Triton kernels that read the score gradients which `keys_backward_kernel` kept: for the queries and the bias tables.

Written is every pair of tiles in which something is seen. What is not seen may lie beside them and is never used.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.triton.attention_kernels import query_range
from freescale.kernels.attention.triton.bias_gradient_kernels import (
    NUM_BUCKETS,
    add_by_bucket,
    at_one_position,
    write_by_bucket,
    write_by_distance,
)
from freescale.kernels.attention.triton.tiles import (
    BIAS_ROWS,
    TILE_FIELDS,
    bias_rows,
    masked_stages,
    own_tile,
    pair_number,
    read_bias,
    read_rows,
    score_index,
    visible,
    write_rows,
)


@triton.jit
def kept_pair(
    dq, K, Scores, Visibility, k_row, k_head, num_heads, window, prefix,
    start, length, history, store0, first, n0, head, key_head,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SQUARE: tl.constexpr, LISTED: tl.constexpr, VISIBILITY: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what one key tile gives to the gradient of a query tile."""
    k = read_rows(K, start, n0, key_head, k_row, k_head, length, WIDTH, BLOCK_D, BLOCK_N, not MASKED, TMA)
    ds = tl.load(Scores + score_index(store0, length, first, n0, head, num_heads, BLOCK_M, BLOCK_N, SQUARE))
    if MASKED:
        seen = visible(
            first,
            n0,
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
        # What is not seen may never have been written.
        ds = tl.where(seen, ds, 0.0)
    return tl.dot(ds, k, dq, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def kept_queries_kernel(
    K, DQ, Scores, Tiles, Pairs, Visibility,
    k_row, dq_row, k_head, dq_head, num_heads, dq_scale, window, prefix: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SQUARE: tl.constexpr, LISTED: tl.constexpr, VISIBILITY: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Gradient of one query tile from score gradients that were kept: one product instead of three."""
    tile, head, start, length, first, history, store0 = own_tile(Tiles, num_heads, BLOCK_M)
    begin, middle, end = query_range(Tiles, tile, first, length, BLOCK_M, BLOCK_N, LISTED)
    key_head = head // GROUP
    dq = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    for n in tl.range(begin, middle, num_stages=STAGES):
        n0 = pair_number(Pairs, n, LISTED) * BLOCK_N
        dq = kept_pair(
            dq, K, Scores, Visibility, k_row, k_head, num_heads, window, prefix,
            start, length, history, store0, first, n0, head, key_head,
            WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, SQUARE, LISTED, VISIBILITY, TMA, PRECISION, ACC, False,
        )  # fmt: skip
    for n in tl.range(middle, end, num_stages=masked_stages(STAGES, LISTED)):
        n0 = pair_number(Pairs, n, LISTED) * BLOCK_N
        dq = kept_pair(
            dq, K, Scores, Visibility, k_row, k_head, num_heads, window, prefix,
            start, length, history, store0, first, n0, head, key_head,
            WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, SQUARE, LISTED, VISIBILITY, TMA, PRECISION, ACC, True,
        )  # fmt: skip
    write_rows(DQ, dq * dq_scale, start, first, head, dq_row, dq_head, length, WIDTH, BLOCK_D, BLOCK_M)


@triton.jit
def kept_gradient_kernel(
    Scores, Sums, Buckets, Visibility, Runs, num_heads: tl.constexpr, window, prefix: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SQUARE: tl.constexpr, LISTED: tl.constexpr, VISIBILITY: tl.constexpr, TARGETS: tl.constexpr, ACC: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, BUCKET_ROWS: tl.constexpr,
):  # fmt: skip
    """What a run of tiles gives to the tables, from score gradients that were kept.

    All tiles of a run have the same distances, so they are added up as tiles and turned only once. Small tiles of one
    warp: few buckets in each, and their sums need no barrier.
    """
    run = tl.program_id(0).to(tl.int64)
    start = tl.load(Runs + run * TILE_FIELDS)
    length = tl.load(Runs + run * TILE_FIELDS + 1).to(tl.int32)
    row = tl.load(Runs + run * TILE_FIELDS + 2).to(tl.int32)
    column = tl.load(Runs + run * TILE_FIELDS + 3).to(tl.int32)
    count = tl.load(Runs + run * TILE_FIELDS + 4).to(tl.int32)
    history = tl.load(Runs + run * TILE_FIELDS + 6).to(tl.int32)
    store0 = tl.load(Runs + run * TILE_FIELDS + 7)
    sums = tl.zeros([NUM_BUCKETS], ACC)
    along = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for n in range(count):
        i0 = (row + n) * BLOCK_M
        j0 = (column + n) * BLOCK_N
        i = i0 + tl.arange(0, BLOCK_M)
        at = Scores + score_index(store0, length, i0, j0, i0 * 0, num_heads, BLOCK_M, BLOCK_N, SQUARE)
        _, width = bias_rows(store0, length, i0, SQUARE)
        total = tl.load(at).to(ACC)
        for head in tl.static_range(1, num_heads):
            total += tl.load(at + head * BIAS_ROWS * width).to(ACC)
        bucket = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        if HAS_TIME:
            bucket = read_bias(Buckets, store0, length, i0, j0, BLOCK_M, BLOCK_N, SQUARE).to(tl.int32)
        low = tl.min(bucket)
        high = tl.max(bucket)
        if LISTED or j0 + BLOCK_N > i0 + 1 or i0 + BLOCK_M > length:
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
            # What is not seen may never have been written.
            total = tl.where(seen, total, 0.0)
            low = tl.min(tl.where(seen, bucket, NUM_BUCKETS))
            high = tl.max(tl.where(seen, bucket, -1))
        if HAS_TIME:
            sums = add_by_bucket(sums, total, bucket, low, high)
        if TARGETS and i0 + BLOCK_M > history:
            total = at_one_position(total, i0, j0, history, BLOCK_M, BLOCK_N)
        along += total
    if HAS_TIME:
        write_by_bucket(Sums, run, sums, BLOCK_M, BLOCK_N, BUCKET_ROWS)
    if HAS_POSITION:
        write_by_distance(Sums, run, along, BLOCK_M, BLOCK_N, BUCKET_ROWS)
