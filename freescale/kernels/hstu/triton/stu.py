"""Triton kernels of a layer whose gate hands on u, the attended values and their gated norm; each row by row."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.hstu.triton.rows import _masked, _normed, _places, _through_norm


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    X, Out, Rstd, Residual, x_row, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Out = norm(x), what its rows were divided by, and a copy of x to which the layer adds its product."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    at = rows[:, None] * WIDTH + columns[None, :]
    x = tl.load(X + rows[:, None] * x_row + columns[None, :], mask=inside, other=0.0)
    y, rstd = _normed(x.to(tl.float32), inside, WIDTH)
    tl.store(Out + at, y.to(Out.dtype.element_ty), mask=inside)
    tl.store(Rstd + rows, rstd, mask=rows < num_rows)
    if RESIDUAL:
        tl.store(Residual + at, x, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def norm_backward_kernel(
    Y, Rstd, DY, Residual, DX, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Gradient of x through its norm, and past it."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    at = rows[:, None] * WIDTH + columns[None, :]
    y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.load(Rstd + rows, mask=rows < num_rows, other=0.0)
    dx = _through_norm(dy, y, rstd, WIDTH)
    if RESIDUAL:
        dx += tl.load(Residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "site"])
def gate_kernel(
    U, A, Weight, Bias, Keys, Out, u_row, a_row, num_rows, site,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Out = [SiLU(u), a, SiLU(u) * (norm(a) * weight + bias)], masked."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    u = tl.load(U + rows[:, None] * u_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    a = tl.load(A + rows[:, None] * a_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(Weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    bias = tl.load(Bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    y, _ = _normed(a, inside, WIDTH)
    u = u * tl.sigmoid(u)
    gated = u * (y * weight[None, :] + bias[None, :])
    to = Out + rows[:, None] * (3 * WIDTH) + columns[None, :]
    kept_u = _masked(u, Keys, rows, columns, num_rows, site, THRESHOLD, SCALE)
    tl.store(to, kept_u.to(Out.dtype.element_ty), mask=inside)
    kept_a = _masked(a, Keys, rows, columns + WIDTH, num_rows, site, THRESHOLD, SCALE)
    tl.store(to + WIDTH, kept_a.to(Out.dtype.element_ty), mask=inside)
    gated = _masked(gated, Keys, rows, columns + 2 * WIDTH, num_rows, site, THRESHOLD, SCALE)
    tl.store(to + 2 * WIDTH, gated.to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "site"])
def gate_backward_kernel(
    U, A, Weight, Bias, DOut, Keys, DU, DA, Sums, u_row, a_row, du_row, num_rows, site,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Gradients of u and a, and over the rows of a program those of weight and bias."""
    columns = tl.arange(0, BLOCK)
    weight = tl.load(Weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    bias = tl.load(Bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    d_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(STEPS):
        rows = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & (columns[None, :] < WIDTH)
        u = tl.load(U + rows[:, None] * u_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        a = tl.load(A + rows[:, None] * a_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        # All that is read is asked for before anything is written: a read would not be moved before a write.
        at = DOut + rows[:, None] * (3 * WIDTH) + columns[None, :]
        du = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        da = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(at + 2 * WIDTH, mask=inside, other=0.0).to(tl.float32)
        y, rstd = _normed(a, inside, WIDTH)
        gate = tl.sigmoid(u)
        opened = u * gate
        grad = _masked(grad, Keys, rows, columns + 2 * WIDTH, num_rows, site, THRESHOLD, SCALE)
        du = _masked(du, Keys, rows, columns, num_rows, site, THRESHOLD, SCALE)
        du = (du + grad * (y * weight[None, :] + bias[None, :])) * (gate + opened * (1 - gate))
        tl.store(DU + rows[:, None] * du_row + columns[None, :], du.to(DU.dtype.element_ty), mask=inside)
        grad = grad * opened
        d_weight += grad * y
        d_bias += grad
        da = _masked(da, Keys, rows, columns + WIDTH, num_rows, site, THRESHOLD, SCALE)
        da += _through_norm(grad * weight[None, :], y, rstd, WIDTH)
        tl.store(DA + rows[:, None] * WIDTH + columns[None, :], da.to(DA.dtype.element_ty), mask=inside)
    own = Sums + tl.program_id(0).to(tl.int64) * (2 * WIDTH) + columns
    tl.store(own, tl.sum(d_weight, 0), mask=columns < WIDTH)
    tl.store(own + WIDTH, tl.sum(d_bias, 0), mask=columns < WIDTH)
