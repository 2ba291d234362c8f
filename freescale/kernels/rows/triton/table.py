"""Triton kernels that update the rows of a table, each in one pass; row for row the same bits wherever a row stands.

In plain PyTorch a row-wise update is about 25 small kernels, which on a GPU take longer to start than to run.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freescale.kernels.runtime import start_kernel


@triton.jit
def _places(num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    at = rows[:, None] * WIDTH + columns[None, :]
    return rows, at, (rows[:, None] < num_rows) & (columns[None, :] < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def mean_squares_kernel(X, Out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Mean of the squares of every row."""
    rows, at, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    x = tl.load(X + at, mask=inside, other=0.0)
    tl.store(Out + rows, tl.sum(x * x, 1) / WIDTH, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def add_scaled_kernel(
    Table, Chosen, X, Scale, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Add a multiple of each row to the row of the table it belongs to."""
    rows, at, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    chosen = tl.load(Chosen + rows, mask=rows < num_rows, other=0)
    scale = tl.load(Scale + rows, mask=rows < num_rows, other=0.0)
    x = tl.load(X + at, mask=inside, other=0.0)
    to = Table + chosen[:, None] * WIDTH + tl.arange(0, BLOCK)[None, :]
    tl.store(to, tl.load(to, mask=inside, other=0.0) + x * scale[:, None], mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def adam_kernel(
    Grad, Moment1, Moment2, Direction, num_rows, keep1, keep2, correction2, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Move both moments; the direction of Adam."""
    _, at, inside = _places(num_rows, WIDTH, BLOCK, ROWS)
    grad = tl.load(Grad + at, mask=inside, other=0.0)
    moment1 = tl.load(Moment1 + at, mask=inside, other=0.0)
    moment2 = tl.load(Moment2 + at, mask=inside, other=0.0)
    moment1 += (1 - keep1) * (grad - moment1)
    moment2 = keep2 * moment2 + (1 - keep2) * grad * grad
    tl.store(Moment1 + at, moment1, mask=inside)
    tl.store(Moment2 + at, moment2, mask=inside)
    tl.store(Direction + at, moment1 / (tl.sqrt(moment2 / correction2) + eps), mask=inside)


def mean_squares(values: Tensor) -> Tensor:
    """As `rows.mean_squares`."""
    values = values.contiguous()
    if values.data_ptr() % 16:
        # Where memory is not aligned Triton reads in other steps, and would add in another order.
        values = values.clone()
    out = values.new_empty(len(values))
    _start(mean_squares_kernel, {"X": values, "Out": out}, values)
    return out


def add_scaled(table: Tensor, rows: Tensor, values: Tensor, scale: Tensor) -> None:
    """As `rows.add_scaled`."""
    values = values.contiguous()
    tensors = {"Table": table, "Chosen": rows.contiguous(), "X": values, "Scale": scale.contiguous()}
    _start(add_scaled_kernel, tensors, values)


def adam_direction(
    grad: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    *,
    beta1: float,
    beta2: float,
    correction2: float,
    eps: float,
) -> Tensor:
    """As `rows.adam_direction`."""
    grad = grad.contiguous()
    direction = torch.empty_like(grad)
    tensors = {"Grad": grad, "Moment1": moment1, "Moment2": moment2, "Direction": direction}
    _start(adam_kernel, tensors, grad, keep1=beta1, keep2=beta2, correction2=correction2, eps=eps)
    return direction


def _start(kernel, tensors: dict[str, Tensor], values: Tensor, **numbers: float) -> None:
    """Start a kernel over all rows of `values`, about 2,048 numbers a program."""
    if not values.numel():
        return
    num_rows, width = values.shape
    block = max(16, 1 << (width - 1).bit_length())
    rows = max(1, 2048 // block)
    shape = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": 4}
    start_kernel(kernel, (-(-num_rows // rows),), tensors, {"num_rows": num_rows, **numbers}, shape)
