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
def own_piece(Pieces):
    """The block that this program's piece is in, and its number there; -1 where there is no piece."""
    block = tl.load(Pieces + tl.program_id(0) * 2).to(tl.int32)
    number = tl.load(Pieces + tl.program_id(0) * 2 + 1).to(tl.int32)
    return block, number - 1


@triton.jit
def own_block(Rows, Blocks, block):
    """Of a block: start and length of its sequence, first row, where its numbers lie, width."""
    start = tl.load(Rows + block * 3)
    # Inside a block 32 bits are enough, and twice as fast.
    length = tl.load(Rows + block * 3 + 1).to(tl.int32)
    first = tl.load(Rows + block * 3 + 2).to(tl.int32)
    # The compiler cannot see that rows start at whole blocks: without the hint it reads and writes number by number.
    offset = tl.multiple_of(tl.load(Blocks + block * 2), 16)
    width = tl.multiple_of(tl.load(Blocks + block * 2 + 1).to(tl.int32), 16)
    return start, length, first, offset, width


@triton.jit
def is_read(Seen, block, number, seen_row, MASKED: tl.constexpr):
    """Whether any kernel reads this program's piece: there is one, and a mask shows something of it."""
    read = number >= 0
    if MASKED:
        read &= tl.load(Seen + block * seen_row + tl.maximum(number, 0)) != 0
    return read


@triton.jit(do_not_specialize=["seen_row"])
def bucket_kernel(
    QueryTime, KeyTime, Buckets, Rows, Blocks, Pieces, Seen, Edges, seen_row, log2_to_bucket, top_bucket,
    MASKED: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Time bucket of every pair of a piece of a block.

    A float32 logarithm is at most one bucket off; the edges of the buckets, whole numbers, put that right.
    """
    block, number = own_piece(Pieces)
    start, length, first, offset, width = own_block(Rows, Blocks, block)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = number * STRIP + tl.arange(0, STRIP)
    if is_read(Seen, block, number, seen_row, MASKED):
        asked = tl.load(QueryTime + start + tl.minimum(first + row, length - 1))
        happened = tl.load(KeyTime + start + tl.minimum(j, length - 1))
        gap = tl.maximum(tl.abs(asked[:, None] - happened[None, :]), 1)
        guess = (tl.log2(gap.to(tl.float32)) * log2_to_bucket).to(tl.int32)
        guess = tl.maximum(tl.minimum(guess, top_bucket), 0)
        too_high = (gap < tl.load(Edges + guess)).to(tl.int32)
        too_low = (gap >= tl.load(Edges + guess + 1)).to(tl.int32)
        bucket = guess - too_high + too_low
        tl.store(Buckets + offset + row[:, None] * width + j[None, :], bucket.to(tl.uint8))


@triton.jit(do_not_specialize=["seen_row"])
def bias_kernel(
    Bias, Buckets, Position, Time, Rows, Blocks, Pieces, Seen, Shared, last_position, seen_row, factor,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, MASKED: tl.constexpr, TARGETS: tl.constexpr,
    ROWS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Bias of every pair of a piece of a block, times `factor`: its position weight and its time weight.

    TARGETS: tokens from `Shared` on all stand there.
    """
    block, number = own_piece(Pieces)
    _, _, first, offset, width = own_block(Rows, Blocks, block)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = number * STRIP + tl.arange(0, STRIP)
    if is_read(Seen, block, number, seen_row, MASKED):
        at = row[:, None] * width + j[None, :]
        value = tl.zeros([ROWS, STRIP], Position.dtype.element_ty)
        if HAS_POSITION:
            i = first + row
            if TARGETS:
                shared = tl.load(Shared + block).to(tl.int32)
                i = tl.minimum(i, shared)
                j = tl.minimum(j, shared)
            distance = i[:, None] - j[None, :]
            value += tl.load(Position + tl.minimum(tl.maximum(distance, 0), last_position))
        if HAS_TIME:
            value += tl.load(Time + tl.load(Buckets + offset + at).to(tl.int32))
        tl.store(Bias + offset + at, (value * factor).to(Bias.dtype.element_ty))
