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

import triton
import triton.language as tl

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
