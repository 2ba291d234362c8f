"""Triton kernels for what stands beside attention in an HSTU layer: norm, SiLU, and the gate; each row by row.

All of them are bound by memory: they read each number once and write each result once. Sums are float32.
"""

# ruff: noqa: D103
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.dropout import kept

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


@triton.jit
def _silu_slope(x):
    """Derivative of the SiLU."""
    gate = tl.sigmoid(x)
    return gate * (1 + x * (1 - gate))


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    X, Bias, Out, Rstd, Residual, x_row, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Out = norm(x), what its rows were divided by, and Residual = x + bias, to which the layer adds its product."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    at = rows[:, None] * WIDTH + columns[None, :]
    x = tl.load(X + rows[:, None] * x_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(Bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    y, rstd = _normed(x, inside, WIDTH)
    tl.store(Out + at, y.to(Out.dtype.element_ty), mask=inside)
    tl.store(Rstd + rows, rstd, mask=rows < num_rows)
    tl.store(Residual + at, (x + bias[None, :]).to(Residual.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def norm_backward_kernel(
    Y, Rstd, DY, Residual, DX, Sums, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Gradient of x through its norm and past it, and the sum of Residual over the rows of a program."""
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(STEPS):
        rows = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        real = rows < num_rows
        inside = real[:, None] & (columns[None, :] < WIDTH)
        at = rows[:, None] * WIDTH + columns[None, :]
        y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(Residual + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(Rstd + rows, mask=real, other=0.0)
        total += residual
        tl.store(DX + at, (residual + _through_norm(dy, y, rstd, WIDTH)).to(DX.dtype.element_ty), mask=inside)
    own = Sums + tl.program_id(0).to(tl.int64) * WIDTH + columns
    tl.store(own, tl.sum(total, 0), mask=columns < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def silu_kernel(X, Out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """SiLU of all parts of x but the first, side by side."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    for part in tl.static_range(3):
        own = X + rows[:, None] * (4 * WIDTH) + (part + 1) * WIDTH + columns[None, :]
        x = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        to = Out + rows[:, None] * (3 * WIDTH) + part * WIDTH + columns[None, :]
        tl.store(to, (x * tl.sigmoid(x)).to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def silu_backward_kernel(
    X, A, B, C, Out, a_row, b_row, c_row, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient before the SiLU from the gradients of its three parts, which need not lie together."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    for part in tl.static_range(3):
        if part == 0:
            at = A + rows[:, None] * a_row
        elif part == 1:
            at = B + rows[:, None] * b_row
        else:
            at = C + rows[:, None] * c_row
        grad = tl.load(at + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        own = rows[:, None] * (4 * WIDTH) + (part + 1) * WIDTH + columns[None, :]
        x = tl.load(X + own, mask=inside, other=0.0).to(tl.float32)
        tl.store(Out + own, (grad * _silu_slope(x)).to(Out.dtype.element_ty), mask=inside)


@triton.jit
def _masked(x, Keys, rows, columns, num_rows, site, THRESHOLD: tl.constexpr, SCALE: tl.constexpr):
    """X scaled where the mask of a site keeps it, else 0; all of x, and no key read, where nothing is dropped."""
    if THRESHOLD > 0:
        keys = tl.load(Keys + rows, mask=rows < num_rows, other=0)
        x = tl.where(kept(keys, columns, site, THRESHOLD), x * SCALE, 0.0)
    return x


@triton.jit(do_not_specialize=["num_rows", "site"])
def gate_kernel(
    U, A, Keys, Out, u_row, a_row, num_rows, site,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Out = SiLU(u) * norm(a), masked."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    a = tl.load(A + rows[:, None] * a_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + rows[:, None] * u_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    y, _ = _normed(a, inside, WIDTH)
    out = _masked(u * tl.sigmoid(u) * y, Keys, rows, columns, num_rows, site, THRESHOLD, SCALE)
    tl.store(Out + rows[:, None] * WIDTH + columns[None, :], out.to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "site"])
def gate_backward_kernel(
    U, A, DOut, Keys, DU, DA, u_row, a_row, du_row, num_rows, site,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    at = rows[:, None] * WIDTH + columns[None, :]
    a = tl.load(A + rows[:, None] * a_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + rows[:, None] * u_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(DOut + at, mask=inside, other=0.0).to(tl.float32)
    grad = _masked(grad, Keys, rows, columns, num_rows, site, THRESHOLD, SCALE)
    y, rstd = _normed(a, inside, WIDTH)
    du = grad * y * _silu_slope(u)
    tl.store(DU + rows[:, None] * du_row + columns[None, :], du.to(DU.dtype.element_ty), mask=inside)
    da = _through_norm(grad * u * tl.sigmoid(u), y, rstd, WIDTH)
    tl.store(DA + at, da.to(DA.dtype.element_ty), mask=inside)
