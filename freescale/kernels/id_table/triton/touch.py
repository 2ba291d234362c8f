"""Marks of use on a GPU: rows become used now, and their scores change. Import this module where it is used.

Rows are scattered, and memory is written in sectors of 32 bytes: to change 4 or 8 bytes of one, the GPU reads it and
writes it back. With two such changes a row, only memory counts, whatever the shape of the launch: 6.6 G rows/s on an
H200. So a batch that touches much of the table sets one bit a row first, in a list of bits that is 64 times smaller
than the ids and stays in the cache. One pass in order of the rows then brings them into `used` and `score`:

    rows ──scattered──> one bit each (cached) ──in order──> used, score

It costs 24 bytes for every row of the table, touched or not. A batch that touches few rows writes them directly.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# On an H200 a direct touch takes 0.11 ns, and a copy moves the 24 bytes of a row in 0.006 ns. So bits would pay up to
# 18 rows for each touch if setting them were free, which it is not.
ROWS_PER_TOUCH = 8
_BLOCK = 128
_FOLD_BLOCK = 1024


@triton.jit
def mark(marks, rows, real):
    """Set the bits of the rows; who comes first does not matter, so nothing need be put in order around it."""
    bits = (tl.zeros_like(rows) + 1 << (rows & 31)).to(tl.int32)
    tl.atomic_or(marks + (rows >> 5), bits, mask=real, sem="relaxed")


@triton.jit
def _mark_kernel(rows_ptr, marks, count, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(rows_ptr + n, mask=n < count, other=-1)
    mark(marks, rows, rows >= 0)


@triton.jit(do_not_specialize=["now"])
def _fold_kernel(marks, used, score, values_ptr, num_rows, now, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """Every row is read and written back, marked or not: whole sectors, as fast as a copy."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    word = tl.load(marks + (row >> 5), mask=inside, other=0)
    marked = ((word >> (row & 31).to(tl.int32)) & 1) == 1
    value = tl.load(values_ptr)
    before = tl.load(used + row, mask=inside, other=0)
    scores = tl.load(score + row, mask=inside, other=0)
    if MODE == "add":
        changed = tl.where(before != now, scores + value, scores)
    elif MODE == "max":
        changed = tl.maximum(scores, value)
    else:
        changed = tl.zeros_like(scores) + value
    tl.store(score + row, tl.where(marked, changed, scores), mask=inside)
    tl.store(used + row, tl.where(marked, now, before), mask=inside)


@triton.jit(do_not_specialize=["now"])
def _touch_kernel(
    rows_ptr, used, score, values_ptr, count, now,
    MANY: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(rows_ptr + n, mask=n < count, other=-1)
    real = rows >= 0
    if MANY:  # noqa: SIM108  a branch the compiler takes
        values = tl.load(values_ptr + n, mask=real, other=0)
    else:
        values = tl.load(values_ptr) + tl.zeros([BLOCK], tl.int64)
    if MODE == "add":
        # Only the first of several equal rows counts.
        before = tl.atomic_xchg(used + rows, tl.zeros([BLOCK], tl.int32) + now, mask=real, sem="relaxed")
        tl.atomic_add(score + rows, values, mask=real & (before != now), sem="relaxed")
    else:
        if MODE == "max":
            # Equal rows come with equal values, so they all write the same.
            values = tl.maximum(values, tl.load(score + rows, mask=real, other=0))
        tl.store(score + rows, values, mask=real)
        tl.store(used + rows, now, mask=real)


def touch(rows: Tensor, used: Tensor, score: Tensor, values: Tensor, now: int, mode: str) -> None:
    """Mark rows as used now and change their scores, by bits where the batch is large enough for them to pay."""
    if len(values) == 1 and len(rows) * ROWS_PER_TOUCH >= len(used):
        touch_by_bits(rows, used, score, values, now, mode)
    else:
        touch_directly(rows, used, score, values, now, mode)


def touch_directly(rows: Tensor, used: Tensor, score: Tensor, values: Tensor, now: int, mode: str) -> None:
    """Write every row by itself; values of their own are allowed."""
    if len(rows):
        _touch_kernel[(triton.cdiv(len(rows), _BLOCK),)](
            rows, used, score, values, len(rows), now, MANY=len(values) > 1, MODE=mode, BLOCK=_BLOCK, num_warps=4
        )  # fmt: skip


def touch_by_bits(rows: Tensor, used: Tensor, score: Tensor, values: Tensor, now: int, mode: str) -> None:
    """Set bits, then go through the table once; one value for all."""
    marks = no_marks(used)
    if len(rows):
        _mark_kernel[(triton.cdiv(len(rows), _BLOCK),)](rows, marks, len(rows), BLOCK=_BLOCK, num_warps=4)
    fold(marks, used, score, values, now, mode)


def no_marks(used: Tensor) -> Tensor:
    """One bit a row, none of them set: bit r % 32 of word r // 32 is row r."""
    return torch.zeros(triton.cdiv(len(used), 32), dtype=torch.int32, device=used.device)


def fold(marks: Tensor, used: Tensor, score: Tensor, values: Tensor, now: int, mode: str) -> None:
    """The rows whose bits are set are used now, and `values`, a single one, changes their scores."""
    if len(used):
        _fold_kernel[(triton.cdiv(len(used), _FOLD_BLOCK),)](
            marks, used, score, values, len(used), now, MODE=mode, BLOCK=_FOLD_BLOCK, num_warps=4
        )
