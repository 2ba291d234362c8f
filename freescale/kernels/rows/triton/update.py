"""How the kernels of `update_kernels` are started: over a plan, or over rows whose sums are there already."""

# mypy: ignore-errors

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from freescale.kernels.rows.plan import RowPlan, UpdateRule
from freescale.kernels.rows.triton.update_kernels import (
    few_kernel,
    many_kernel,
    numbers_kernel,
    segment_kernel,
)
from freescale.kernels.runtime import CachedLauncher

# Most values that are added one after the other, and how many of a row with more one program adds.
LIMIT, SEGMENT = 64, 512

_WRITE = CachedLauncher(numbers_kernel, ("Numbers",), ("scale", "correction2", "step"), {"num_warps": 1})
_TABLE = ("Weight", "First", "Second", "Numbers", "Out")
_RATES = ("eps", "keep1", "keep2", "scale", "correction2", "step")
Rates = tuple[float, float, float, float, float, int]


@cache
def _few(
    width: int, rule: str, read: bool, summed: bool, counted: bool, _: bool
) -> tuple[CachedLauncher, int]:
    """The kernel over rows with few values, and how many of them a program has; the last: whether numbers are long."""
    block = _block(width)
    # Best of eleven shapes on an H200, 1M ids of width 128, uniform and Zipf: 8 rows, two values at once, four warps.
    rows = max(1, 1024 // block)
    shape = {
        "RULE": rule,
        "READ": read,
        "SUMMED": summed,
        "COUNTED": counted,
        "WIDTH": width,
        "BLOCK_D": block,
        "ROWS": rows,
    }
    tensors = ("X", "Order", "Starts", "Rows", "Count", *_TABLE)
    numbers = ("num_rows", "first_row", "capacity", *_RATES)
    constants = {**shape, "AT_ONCE": 2, "LIMIT": LIMIT, "num_warps": 4}
    return CachedLauncher(few_kernel, tensors, numbers, constants), rows


@cache
def _many(width: int, rule: str, read: bool, _: bool) -> tuple[CachedLauncher, CachedLauncher]:
    """The kernels over segments, and over rows with many values."""
    block = _block(width)
    shape = {"WIDTH": width, "BLOCK_D": block, "AT_ONCE": max(1, 8192 // block), "num_warps": 8}
    tensors = ("X", "Order", "Starts", "Index", "Rows", "Partial", *_TABLE)
    numbers = ("num_rows", "first_row", "num_values", *_RATES)
    return (
        CachedLauncher(
            segment_kernel, ("X", "Order", "Starts", "Index", "Partial"), (), {**shape, "SEGMENT": SEGMENT}
        ),
        CachedLauncher(
            many_kernel,
            tensors,
            numbers,
            {**shape, "RULE": rule, "READ": read, "LIMIT": LIMIT, "SEGMENT": SEGMENT},
        ),
    )


def write_numbers(rule: UpdateRule, *, lr: float, step: int, out: Tensor) -> Tensor:
    """The numbers of a step into `out`, [4] float32 on the device; queued as everything else."""
    _WRITE.start((1,), (out,), (*rule.numbers(lr=lr, step=step), step))
    return out


def update_summed(
    weight: Tensor,
    state: tuple[Tensor, ...],
    rows: Tensor,
    grad: Tensor,
    rule: UpdateRule,
    *,
    lr: float = 0.0,
    step: int = 1,
    numbers: Tensor | None = None,
    first_row: int = 0,
    count: Tensor | None = None,
) -> None:
    """Update these unique rows with their gradients, in place; `count` on the device says how many are real."""
    if not len(rows):
        return
    grad, rows = _aligned(grad), rows.contiguous()
    scalars = (weight.shape[0], first_row)
    read = numbers is not None
    launcher, at_once = _few(weight.shape[1], rule.kind, read, True, count is not None, _long(scalars))
    launcher.start(
        (-(-len(rows) // at_once),),
        (grad, rows, rows, rows, rows if count is None else count, *_table(weight, state, numbers)),
        (*scalars, len(rows), *_rates(rule, lr, step)),
    )


def update_planned(
    weight: Tensor,
    state: tuple[Tensor, ...],
    plan: RowPlan,
    values: Tensor,
    rule: UpdateRule,
    *,
    lr: float = 0.0,
    step: int = 1,
    numbers: Tensor | None = None,
    first_row: int = 0,
) -> None:
    """Update the rows of a plan with the sums of their values, in place."""
    tensors = _table(weight, state, numbers)
    kind = rule.kind, numbers is not None
    _over_plan(plan, values, kind, tensors, (weight.shape[0], first_row), _rates(rule, lr, step))


def sum_planned(plan: RowPlan, values: Tensor, num_rows: int) -> Tensor:
    """[num_rows, width] the sums of the values of each row of a plan, which has so many rows, in float32."""
    out = torch.empty(num_rows, values.shape[1], dtype=torch.float32, device=values.device)
    _over_plan(plan, values, ("sum", False), (out, out, out, out, out), (0, 0), (0.0, 0.0, 0.0, 0.0, 1.0, 1))
    return out


def _over_plan(
    plan: RowPlan,
    values: Tensor,
    kind: tuple[str, bool],
    table: tuple[Tensor, ...],
    scalars: tuple[int, int],
    rates: Rates,
) -> None:
    """The kernels over rows with few and with many values."""
    num, width = values.shape
    if not num:
        return
    values = _aligned(values)
    few, rows = _few(width, *kind, False, True, _long(scalars))
    tensors = (values, plan.order, plan.starts, plan.rows, plan.count, *table)
    few.start((-(-num // rows),), tensors, (*scalars, num, *rates))
    if num <= LIMIT:
        return
    segments, many = _many(width, *kind, _long(scalars))
    partial = torch.empty(-(-num // SEGMENT), width, dtype=torch.float32, device=values.device)
    if num > SEGMENT:
        segments.start((-(-num // SEGMENT),), (values, plan.order, plan.starts, plan.index, partial))
    tensors = (values, plan.order, plan.starts, plan.index, plan.rows, partial, *table)
    many.start((-(-num // LIMIT),), tensors, (*scalars, num, *rates))


def _aligned(values: Tensor) -> Tensor:
    """In one piece, and where Triton reads as everywhere: it would add in another order elsewhere."""
    values = values.contiguous()
    return values if values.data_ptr() % 16 == 0 else values.clone()


def _long(scalars: tuple[int, int]) -> bool:
    """Whether whole numbers are passed with 64 bits: that is another kernel."""
    return max(scalars) >= 2**31


def _table(weight: Tensor, state: tuple[Tensor, ...], numbers: Tensor | None) -> tuple[Tensor, ...]:
    """What the kernels take of a table; where there is nothing, something that they do not look at."""
    first, second = (*state, weight, weight)[:2]
    return weight, first, second, weight if numbers is None else numbers, weight


def _rates(rule: UpdateRule, lr: float, step: int) -> Rates:
    return rule.eps, rule.beta1, rule.beta2, *rule.numbers(lr=lr, step=step), step


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())
