"""Triton kernels for what stands beside attention in an HSTU layer: norm, SiLU, and the gate; each row by row.

All of them are bound by memory: they read each number once and write each result once. Sums are float32.
"""

# ruff: noqa: D103
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)


@triton.jit
def _places(num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    return rows, columns, (rows[:, None] < num_rows) & (columns[None, :] < WIDTH)


@triton.jit
def _normed(x, inside, WIDTH: tl.constexpr):
    """Rows with mean 0 and variance 1, and what they were divided by."""
    mean = tl.sum(x, 1) / WIDTH
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + EPS)
    return centred * rstd[:, None], rstd


@triton.jit
def _through_norm(dy, y, rstd, WIDTH: tl.constexpr):
    """Gradient of a norm's input from that of its output y."""
    mean = tl.sum(dy, 1) / WIDTH
    along = tl.sum(dy * y, 1) / WIDTH
    return (dy - mean[:, None] - y * along[:, None]) * rstd[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(X, Out, x_row, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    x = tl.load(X + rows[:, None] * x_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    y, _ = _normed(x, inside, WIDTH)
    tl.store(Out + rows[:, None] * WIDTH + columns[None, :], y.to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def norm_backward_kernel(
    X, DY, Past, DX, x_row, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Gradient of x through its norm, and Past, what it gets past the norm."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    at = rows[:, None] * WIDTH + columns[None, :]
    x = tl.load(X + rows[:, None] * x_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    past = tl.load(Past + at, mask=inside, other=0.0).to(tl.float32)
    y, rstd = _normed(x, inside, WIDTH)
    tl.store(DX + at, (past + _through_norm(dy, y, rstd, WIDTH)).to(DX.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def silu_kernel(X, Out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    at = rows[:, None] * WIDTH + columns[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + at, (x * tl.sigmoid(x)).to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def silu_backward_kernel(
    X, A, B, C, D, Out, a_row, b_row, c_row, d_row, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient before the SiLU from the gradients of its four parts, which need not lie together."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    for part in tl.static_range(4):
        if part == 0:
            at = A + rows[:, None] * a_row
        elif part == 1:
            at = B + rows[:, None] * b_row
        elif part == 2:
            at = C + rows[:, None] * c_row
        else:
            at = D + rows[:, None] * d_row
        grad = tl.load(at + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        own = rows[:, None] * (4 * WIDTH) + part * WIDTH + columns[None, :]
        x = tl.load(X + own, mask=inside, other=0.0).to(tl.float32)
        gate = tl.sigmoid(x)
        tl.store(Out + own, (grad * gate * (1 + x * (1 - gate))).to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def gate_kernel(
    U, A, Out, u_row, a_row, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Out = u * norm(a)."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    a = tl.load(A + rows[:, None] * a_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + rows[:, None] * u_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    y, _ = _normed(a, inside, WIDTH)
    tl.store(Out + rows[:, None] * WIDTH + columns[None, :], (u * y).to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def gate_backward_kernel(
    U, A, DOut, DU, DA, u_row, a_row, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    at = rows[:, None] * WIDTH + columns[None, :]
    a = tl.load(A + rows[:, None] * a_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + rows[:, None] * u_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(DOut + at, mask=inside, other=0.0).to(tl.float32)
    y, rstd = _normed(a, inside, WIDTH)
    tl.store(DU + at, (grad * y).to(DU.dtype.element_ty), mask=inside)
    tl.store(DA + at, _through_norm(grad * u, y, rstd, WIDTH).to(DA.dtype.element_ty), mask=inside)
