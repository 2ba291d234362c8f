"""Triton kernels for what stands between the products of expert MLPs: gather, activation and its backward, sums.

All of them are bound by memory: each number is read once and each result written once, in float32 between. Nothing is
added across programs, so results do not depend on their order. Row numbers are int32, places in memory int64.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """The activation; `up` counts for SwiGLU only."""
    if ACTIVATION == "relu2":
        positive = tl.maximum(gate, 0.0)
        out = positive * positive
    else:
        out = gate * tl.sigmoid(gate)
        if ACTIVATION == "swiglu":
            out *= up
    return out


@triton.jit
def through_activation(gate, up, d_activated, ACTIVATION: tl.constexpr):
    """The activation again, and the gradients of gate and up from that of the activation."""
    d_gate, d_up = d_activated, d_activated
    if ACTIVATION == "relu2":
        positive = tl.maximum(gate, 0.0)
        out = positive * positive
        d_gate *= 2 * positive
    else:
        sigmoid = tl.sigmoid(gate)
        out = gate * sigmoid
        d_gate *= sigmoid + out * (1 - sigmoid)
        if ACTIVATION == "swiglu":
            d_gate *= up
            d_up *= out
            out *= up
    return out, d_gate, d_up


@triton.jit
def _places(num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return rows, columns, (rows[:, None] < num_rows) & (columns[None, :] < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def gather_kernel(
    Values, Tokens, Out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Out[r] = Values[Tokens[r]]."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    token = tl.load(Tokens + rows, mask=rows < num_rows, other=0).to(tl.int64)
    values = tl.load(Values + token[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    tl.store(Out + rows[:, None] * WIDTH + columns[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def activate_kernel(
    Hidden, Out, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Out[r, c] = activation(Hidden[r, c], Hidden[r, WIDTH + c])."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    at = rows[:, None] * (WIDTH * PARTS) + columns[None, :]
    gate = tl.load(Hidden + at, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if PARTS == 2:
        up = tl.load(Hidden + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    out = activated(gate, up, ACTIVATION)
    tl.store(Out + rows[:, None] * WIDTH + columns[None, :], out.to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def activate_backward_kernel(
    Hidden, DActivated, Weights, DWeights, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Gradients over Hidden; weight * activated over DActivated; DWeights[r] = sum of activated * DActivated."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(Weights + rows, mask=rows < num_rows, other=0.0)[:, None]
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = (rows[:, None] < num_rows) & (columns[None, :] < WIDTH)
        at = rows[:, None] * (WIDTH * PARTS) + columns[None, :]
        own = rows[:, None] * WIDTH + columns[None, :]
        gate = tl.load(Hidden + at, mask=inside, other=0.0).to(tl.float32)
        up = gate
        if PARTS == 2:
            up = tl.load(Hidden + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
        d_activated = tl.load(DActivated + own, mask=inside, other=0.0).to(tl.float32)
        out, d_gate, d_up = through_activation(gate, up, d_activated * weight, ACTIVATION)
        products += out * d_activated
        tl.store(Hidden + at, d_gate.to(Hidden.dtype.element_ty), mask=inside)
        if PARTS == 2:
            tl.store(Hidden + at + WIDTH, d_up.to(Hidden.dtype.element_ty), mask=inside)
        tl.store(DActivated + own, (out * weight).to(DActivated.dtype.element_ty), mask=inside)
    tl.store(DWeights + rows, tl.sum(products, 1), mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(
    Rows, Places, Weights, Out, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Out[token] = sum over its choices of Weights * Rows[Places], in the order of the choices."""
    rows, columns, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        at = rows * CHOICES + choice
        place = tl.load(Places + at, mask=rows < num_rows, other=0).to(tl.int64)
        row = tl.load(Rows + place[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(Weights + at, mask=rows < num_rows, other=0.0)[:, None]
        total += row
    out = Out + rows[:, None] * WIDTH + columns[None, :]
    tl.store(out, total.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def store_kernel(Offsets, Total, Part, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """ADD: Total[e] += Part[e] for the experts with rows; otherwise Total[e] = 0 for those without."""
    expert = tl.program_id(0)
    has_rows = tl.load(Offsets + expert + 1) > tl.load(Offsets + expert)
    if has_rows == ADD:
        inner = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = inner < SIZE
        at = expert.to(tl.int64) * SIZE + inner
        if ADD:
            total = tl.load(Total + at, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(Part + at, mask=inside, other=0.0).to(tl.float32)
        else:
            total = tl.zeros([BLOCK], tl.float32)
        tl.store(Total + at, total.to(Total.dtype.element_ty), mask=inside)
