"""Triton kernel that adds up rows of several tables."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows_of(Table, Index, tokens, columns, real, inside, STRIDE: tl.constexpr, SCALE: tl.constexpr):
    rows = tl.load(Index + tokens, mask=real, other=-1).to(tl.int64)
    there = inside & (rows >= 0)[:, None]
    at = Table + rows[:, None] * STRIDE + columns[None, :]
    return tl.load(at, mask=there, other=0.0).to(tl.float32) * SCALE


@triton.jit(do_not_specialize=["num_rows"])
def sum_taken_kernel(
    Table0, Index0, Table1, Index1, Table2, Index2, Table3, Index3, Table4, Index4, Out, num_rows,
    STRIDE0: tl.constexpr, STRIDE1: tl.constexpr, STRIDE2: tl.constexpr, STRIDE3: tl.constexpr, STRIDE4: tl.constexpr,
    SCALE0: tl.constexpr, SCALE1: tl.constexpr, SCALE2: tl.constexpr, SCALE3: tl.constexpr, SCALE4: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Out[t] = sum of SCALE * Table[Index[t]] over the tables; an index below 0 picks nothing."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    real = tokens < num_rows
    inside = real[:, None] & (columns[None, :] < WIDTH)
    total = _rows_of(Table0, Index0, tokens, columns, real, inside, STRIDE0, SCALE0)
    if PARTS > 1:
        total += _rows_of(Table1, Index1, tokens, columns, real, inside, STRIDE1, SCALE1)
    if PARTS > 2:
        total += _rows_of(Table2, Index2, tokens, columns, real, inside, STRIDE2, SCALE2)
    if PARTS > 3:
        total += _rows_of(Table3, Index3, tokens, columns, real, inside, STRIDE3, SCALE3)
    if PARTS > 4:
        total += _rows_of(Table4, Index4, tokens, columns, real, inside, STRIDE4, SCALE4)
    tl.store(Out + tokens[:, None] * WIDTH + columns[None, :], total.to(Out.dtype.element_ty), mask=inside)
