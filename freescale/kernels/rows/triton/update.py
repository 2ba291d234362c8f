"""Triton kernels that sum the values of each row and update it in the same pass: its gradient never goes to memory.

    few         up to LIMIT values      several rows a program, values one after the other as they stand
    segments    beyond the first SEGMENT values of a row: a program for each further SEGMENT, counted from the row's
                own start; sums go to a buffer
    many        more than LIMIT values  a program a row: its first segment, then the sums of the others in order

So what a row becomes depends on its own values alone, whatever rows stand beside it, and no program adds to what
another one writes. Nobody counts long rows: a row with more than LIMIT values that begins within LIMIT places is the
one at the last of them, and a segment that begins within SEGMENT places belongs to the row at the first of them.

The number of rows is read from device memory, and so are learning rate and step where `numbers` holds them: a captured
graph can be replayed with others. Otherwise they are arguments, which saves a launch.
"""

# mypy: ignore-errors

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from freescale.kernels.rows.plan import RowPlan, UpdateRule
from freescale.kernels.runtime import CachedLauncher

LIMIT = 64
SEGMENT = 512
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    """As `embedding.hashing.mix64`."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _rounded(values, rows, columns, Numbers, step, first_row, READ: tl.constexpr, WIDTH: tl.constexpr):
    """bfloat16 by adding 16 random low bits and cutting them off; keyed by (step, row, column)."""
    of_step = tl.zeros([1, 1], tl.uint64)
    if READ:
        of_step += tl.load(Numbers + 2).to(tl.uint64) + tl.load(Numbers + 3).to(tl.uint64) * 65536
    else:
        of_step += step
    seed = _mix(of_step * GOLDEN + 1)
    key = (rows + first_row)[:, None] * WIDTH + columns[None, :]
    noise = _mix(key.to(tl.uint64) * GOLDEN + seed) & 0xFFFF
    bits = values.to(tl.uint32, bitcast=True) + noise.to(tl.uint32)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _finish(
    total, number, rows, own, columns, Weight, First, Second, Numbers, Out,
    scale, correction2, step, first_row, eps, keep1, keep2,
    RULE: tl.constexpr, READ: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Update rows with the sums of their values, or write the sums."""
    inside = own[:, None] & (columns[None, :] < WIDTH)
    if RULE == "sum":
        tl.store(Out + number[:, None] * WIDTH + columns[None, :], total, mask=inside)
    else:
        at = rows[:, None] * WIDTH + columns[None, :]
        if READ:
            scale = tl.load(Numbers)
            correction2 = tl.load(Numbers + 1)
        old = tl.load(Weight + at, mask=inside, other=0.0).to(tl.float32)
        if RULE == "sgd":
            new = old + total * scale
        elif RULE == "rowwise_adagrad":
            squares = tl.load(First + rows, mask=own, other=0.0) + tl.sum(total * total, 1) / WIDTH
            tl.store(First + rows, squares, mask=own)
            # Rounded as torch rounds: this kernel and the plain path agree to the last bit.
            scale = tl.div_rn(tl.full(squares.shape, 1.0, tl.float32), tl.sqrt_rn(squares) + eps) * scale
            new = old + total * scale[:, None]
        else:
            moment1 = tl.load(First + at, mask=inside, other=0.0)
            moment2 = tl.load(Second + at, mask=inside, other=0.0)
            moment1 += (1 - keep1) * (total - moment1)
            moment2 = keep2 * moment2 + (1 - keep2) * total * total
            tl.store(First + at, moment1, mask=inside)
            tl.store(Second + at, moment2, mask=inside)
            new = old + (moment1 / (tl.sqrt(moment2 / correction2) + eps)) * scale
        if Weight.dtype.element_ty == tl.bfloat16:
            new = _rounded(new, rows, columns, Numbers, step, first_row, READ, WIDTH)
        tl.store(Weight + at, new, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "first_row", "capacity", "step"])
def few_kernel(
    X, Order, Starts, Rows, Count, Weight, First, Second, Numbers, Out,
    num_rows, first_row, capacity, eps, keep1, keep2, scale, correction2, step,
    RULE: tl.constexpr, READ: tl.constexpr, SUMMED: tl.constexpr, COUNTED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Rows that have at most LIMIT values; or of which the sums are there already, a row of X each."""
    num = capacity
    if COUNTED:
        num = tl.load(Count)
    if tl.program_id(0) * ROWS < num:
        number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK_D)
        own = number < num
        rows = tl.load(Rows + number, mask=own, other=0).to(tl.int64)
        number = number.to(tl.int64)
        if SUMMED:
            inside = own[:, None] & (columns[None, :] < WIDTH)
            total = tl.load(X + number[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
        else:
            first = tl.load(Starts + number, mask=own, other=0)
            count = tl.load(Starts + number + 1, mask=own, other=0) - first
            own = own & (count <= LIMIT)
            count = tl.where(own, count, 0)
            total = tl.zeros([ROWS, BLOCK_D], tl.float32)
            for done in range(0, tl.max(count, 0), AT_ONCE):
                for n in tl.static_range(AT_ONCE):
                    real = done + n < count
                    value = tl.load(Order + first + done + n, mask=real, other=0).to(tl.int64)
                    at = X + value[:, None] * WIDTH + columns[None, :]
                    inside = real[:, None] & (columns[None, :] < WIDTH)
                    total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if RULE != "sum":
            own = own & (rows < num_rows)
        _finish(
            total, number, rows, own, columns, Weight, First, Second, Numbers, Out,
            scale, correction2, step, first_row, eps, keep1, keep2, RULE, READ, WIDTH,
        )  # fmt: skip


@triton.jit
def _segment(
    X, Order, begin, end, columns, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Sum of the values from begin to end, AT_ONCE rows of partial sums at first."""
    numbers = tl.arange(0, AT_ONCE)
    total = tl.zeros([AT_ONCE, BLOCK_D], tl.float32)
    for start in range(begin, end, AT_ONCE):
        real = start + numbers < end
        value = tl.load(Order + start + numbers, mask=real, other=0).to(tl.int64)
        at = X + value[:, None] * WIDTH + columns[None, :]
        total += tl.load(at, mask=real[:, None] & (columns[None, :] < WIDTH), other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def segment_kernel(
    X, Order, Starts, Index, Partial,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """The sum of a row's further segment that begins within these SEGMENT places, if there is one."""
    place = tl.program_id(0) * SEGMENT
    row = tl.load(Index + place)
    first = tl.load(Starts + row)
    end = tl.load(Starts + row + 1)
    begin = first + (place - first + SEGMENT - 1) // SEGMENT * SEGMENT
    if (first < place) & (begin < end):
        columns = tl.arange(0, BLOCK_D)
        total = _segment(X, Order, begin, tl.minimum(begin + SEGMENT, end), columns, WIDTH, BLOCK_D, AT_ONCE)
        tl.store(Partial + tl.program_id(0).to(tl.int64) * WIDTH + columns, total, mask=columns < WIDTH)


@triton.jit(do_not_specialize=["num_rows", "first_row", "num_values", "step"])
def many_kernel(
    X, Order, Starts, Index, Rows, Partial, Weight, First, Second, Numbers, Out,
    num_rows, first_row, num_values, eps, keep1, keep2, scale, correction2, step,
    RULE: tl.constexpr, READ: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
    LIMIT: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """The row with more than LIMIT values that begins within these LIMIT places, if there is one."""
    place = tl.program_id(0) * LIMIT
    number = tl.load(Index + tl.minimum(place + LIMIT, num_values) - 1)
    first = tl.load(Starts + number)
    end = tl.load(Starts + number + 1)
    row = tl.load(Rows + number).to(tl.int64)
    if (first >= place) & (end - first > LIMIT) & ((RULE == "sum") | (row < num_rows)):
        columns = tl.arange(0, BLOCK_D)
        total = _segment(X, Order, first, tl.minimum(first + SEGMENT, end), columns, WIDTH, BLOCK_D, AT_ONCE)
        if end - first > SEGMENT:
            more = (end - first + SEGMENT - 1) // SEGMENT - 1
            numbers = tl.arange(0, AT_ONCE)
            sums = tl.zeros([AT_ONCE, BLOCK_D], tl.float32)
            for start in range(0, more, AT_ONCE):
                at = (first // SEGMENT + 1 + start + numbers).to(tl.int64)
                real = (start + numbers < more)[:, None] & (columns[None, :] < WIDTH)
                sums += tl.load(Partial + at[:, None] * WIDTH + columns[None, :], mask=real, other=0.0)
            total += tl.sum(sums, 0)
        one = tl.zeros([1], tl.int64)
        _finish(
            total[None, :], one + number, one + row, one == 0, columns, Weight, First, Second, Numbers, Out,
            scale, correction2, step, first_row, eps, keep1, keep2, RULE, READ, WIDTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["step"])
def numbers_kernel(Numbers, scale, correction2, step):
    """The numbers of one step, as the kernels above read them."""
    tl.store(Numbers, scale)
    tl.store(Numbers + 1, correction2)
    # In two parts, so that float32 holds them exactly.
    tl.store(Numbers + 2, step % 65536)
    tl.store(Numbers + 3, step // 65536)


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
        segments.start((len(partial),), (values, plan.order, plan.starts, plan.index, partial))
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
