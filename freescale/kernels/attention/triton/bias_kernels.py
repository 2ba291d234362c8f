"""Triton kernels of the relative bias: time buckets, and the bias of every pair.

The bias of a pair does not depend on the head. So it is worked out once a layer into a `BiasStore` (half precision for
half-precision inputs) that all heads read like one more operand. Buckets depend on the batch alone and serve every
layer. Gradients are in `bias_gradient_kernels`.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def own_block(Rows, Blocks):
    """Of this program's block: start and length of its sequence, first row, where its numbers lie, width."""
    block = tl.program_id(0)
    start = tl.load(Rows + block * 3)
    # Inside a block 32 bits are enough, and twice as fast.
    length = tl.load(Rows + block * 3 + 1).to(tl.int32)
    first = tl.load(Rows + block * 3 + 2).to(tl.int32)
    # The compiler cannot see that rows start at whole blocks: without the hint it reads and writes number by number.
    offset = tl.multiple_of(tl.load(Blocks + block * 2), 16)
    width = tl.multiple_of(tl.load(Blocks + block * 2 + 1).to(tl.int32), 16)
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
    Bias, Buckets, Position, Time, Rows, Blocks, Seen, last_position, factor,
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
            value += tl.load(Position + tl.minimum(tl.maximum(distance, 0), last_position))
        if HAS_TIME:
            value += tl.load(Time + tl.load(Buckets + offset + at).to(tl.int32))
        tl.store(Bias + offset + at, (value * factor).to(Bias.dtype.element_ty))
