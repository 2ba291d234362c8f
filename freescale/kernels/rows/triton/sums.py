"""Triton kernels that add up rows by where they belong: gradients of gathered rows, and of positions.

No program adds to what another one writes, so sums come out the same in every run. Rows with few values add them one
after the other, as they stand; each of the others is added up by programs of its own, so that a popular item does not
hold up its neighbours. What a row has beyond its first SEGMENT values is added up before, a program for each SEGMENT:
half of all tokens may share one row.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freescale.kernels.runtime import start_kernel

# Most values that are added one after the other.
LIMIT = 64
# Values of a row that one program adds up.
SEGMENT = 1024


@triton.jit(do_not_specialize=["num_rows"])
def few_kernel(
    X, Order, Starts, Onto, Out, num_rows, scale,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, LIMIT: tl.constexpr,
    ONTO: tl.constexpr,
):  # fmt: skip
    """Scaled sums of the rows that have at most LIMIT values, added to what is there already."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(Starts + rows, mask=rows < num_rows, other=0)
    count = tl.load(Starts + rows + 1, mask=rows < num_rows, other=0) - first
    own = (rows < num_rows) & (count <= LIMIT)
    count = tl.where(own, count, 0)
    total = tl.zeros([ROWS, BLOCK_D], Out.dtype.element_ty)
    for done in range(0, tl.max(count, 0), AT_ONCE):
        for n in tl.static_range(AT_ONCE):
            real = done + n < count
            values = tl.load(Order + first + done + n, mask=real, other=0).to(tl.int64)
            at = X + values[:, None] * WIDTH + columns[None, :]
            inside = real[:, None] & (columns[None, :] < WIDTH)
            total += tl.load(at, mask=inside, other=0.0).to(Out.dtype.element_ty)
    to = rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
    inside = own[:, None] & (columns[None, :] < WIDTH)
    total *= scale
    if ONTO:
        total += tl.load(Onto + to, mask=inside, other=0.0).to(Out.dtype.element_ty)
    tl.store(Out + to, total, mask=inside)


@triton.jit
def _added(
    X, Order, begin, end, columns,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Sum of the values at these places of the order, some columns of it."""
    numbers = tl.arange(0, AT_ONCE)
    total = tl.zeros([AT_ONCE, BLOCK_D], KIND)
    values = tl.load(Order + begin + numbers, mask=begin + numbers < end, other=0).to(tl.int64)
    for start in range(begin, end, AT_ONCE):
        # The next places are asked for before these values have arrived: half the time of a step is waiting.
        ahead = start + AT_ONCE + numbers
        later = tl.load(Order + ahead, mask=ahead < end, other=0).to(tl.int64)
        inside = (start + numbers < end)[:, None] & (columns[None, :] < WIDTH)
        at = X + values[:, None] * WIDTH + columns[None, :]
        total += tl.load(at, mask=inside, other=0.0).to(KIND)
        values = later
    return tl.sum(total, 0)


@triton.jit
def segment_kernel(
    X, Order, Sorted, Starts, Partial,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """The sum of a row's further segment that begins within these SEGMENT places, if there is one."""
    place = tl.program_id(0) * SEGMENT
    row = tl.load(Sorted + place)
    first = tl.load(Starts + row)
    end = tl.load(Starts + row + 1)
    begin = first + (place - first + SEGMENT - 1) // SEGMENT * SEGMENT
    if (first < place) & (begin < end):
        columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        stop = tl.minimum(begin + SEGMENT, end)
        total = _added(X, Order, begin, stop, columns, WIDTH, BLOCK_D, AT_ONCE, Partial.dtype.element_ty)
        tl.store(Partial + tl.program_id(0).to(tl.int64) * WIDTH + columns, total, mask=columns < WIDTH)


@triton.jit
def many_kernel(
    X, Order, Sorted, Starts, Onto, Partial, Out, scale,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr, LIMIT: tl.constexpr, SEGMENT: tl.constexpr,
    ONTO: tl.constexpr,
):  # fmt: skip
    """Scaled sum of a row that has more than LIMIT values, some columns of it, added to what is there already.

    There is a program for every LIMIT values. It works on the row of its first value if that row has so many, and if
    no program before it does: so each of these rows is found without anybody counting them.
    """
    place = tl.program_id(0) * LIMIT
    row = tl.load(Sorted + place)
    first = tl.load(Starts + row)
    end = tl.load(Starts + row + 1)
    if (end - first > LIMIT) & (first > place - LIMIT):
        columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        stop = tl.minimum(first + SEGMENT, end)
        out = _added(X, Order, first, stop, columns, WIDTH, BLOCK_D, AT_ONCE, Out.dtype.element_ty)
        if end - first > SEGMENT:
            more = (end - first + SEGMENT - 1) // SEGMENT - 1
            numbers = tl.arange(0, AT_ONCE)
            sums = tl.zeros([AT_ONCE, BLOCK_D], Out.dtype.element_ty)
            for start in range(0, more, AT_ONCE):
                at = (first // SEGMENT + 1 + start + numbers).to(tl.int64)
                real = (start + numbers < more)[:, None] & (columns[None, :] < WIDTH)
                sums += tl.load(Partial + at[:, None] * WIDTH + columns[None, :], mask=real, other=0.0)
            out += tl.sum(sums, 0)
        to = row.to(tl.int64) * WIDTH + columns
        out = out * scale
        if ONTO:
            out += tl.load(Onto + to, mask=columns < WIDTH, other=0.0).to(Out.dtype.element_ty)
        tl.store(Out + to, out, mask=columns < WIDTH)


@triton.jit(do_not_specialize=["longest"])
def position_kernel(
    X, First, Reach, Out, longest,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sum over all sequences of the row at one position of theirs; only the longest ones reach so far."""
    place = tl.program_id(0)
    count = tl.load(Reach + place, mask=place < longest, other=0)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    numbers = tl.arange(0, AT_ONCE)
    total = tl.zeros([AT_ONCE, BLOCK_D], Out.dtype.element_ty)
    for start in range(0, count, AT_ONCE):
        real = start + numbers < count
        tokens = tl.load(First + start + numbers, mask=real, other=0).to(tl.int64) + place
        inside = real[:, None] & (columns[None, :] < WIDTH)
        at = X + tokens[:, None] * WIDTH + columns[None, :]
        total += tl.load(at, mask=inside, other=0.0).to(Out.dtype.element_ty)
    to = Out + place.to(tl.int64) * WIDTH + columns
    tl.store(to, tl.sum(total, 0), mask=columns < WIDTH)


def sum_by_index(
    values: Tensor, index: Tensor, num_rows: int, *, scale: float = 1.0, onto: Tensor | None = None
) -> Tensor:
    """[num_rows, width] scale * sum of the values of each index, and `onto`, in float32 or better."""
    values = values.contiguous()
    width = values.shape[1]
    out = values.new_empty(num_rows, width, dtype=_wide(values.dtype))
    if not index.shape[0]:
        return out.zero_() if onto is None else out.copy_(onto)
    # Keys of 32 bits: half the passes of the sort.
    ordered, order = index.flatten().int().sort(stable=True)
    edges = torch.arange(num_rows + 1, dtype=torch.int32, device=index.device)
    starts = torch.searchsorted(ordered, edges, out_int32=True)
    tensors = {"X": values, "Order": order, "Starts": starts, "Out": out}
    tensors["Onto"] = out if onto is None else onto.contiguous()
    fixed = {"WIDTH": width, "LIMIT": LIMIT, "ONTO": onto is not None}
    block = _block(width, 512)
    rows = max(1, 2048 // block)
    shape = {**fixed, "BLOCK_D": block, "ROWS": rows, "AT_ONCE": 4, "num_warps": 4}
    numbers = {"num_rows": num_rows, "scale": float(scale)}
    start_kernel(few_kernel, (-(-num_rows // rows), -(-width // block)), tensors, numbers, shape)
    num = ordered.shape[0]
    if num > LIMIT:
        block = _block(width, 64)
        shape = {"WIDTH": width, "BLOCK_D": block, "AT_ONCE": 128, "SEGMENT": SEGMENT, "num_warps": 8}
        tensors["Sorted"] = ordered
        tensors["Partial"] = out.new_empty(-(-num // SEGMENT), width) if num > SEGMENT else out
        if num > SEGMENT:
            needed = {name: tensors[name] for name in ("X", "Order", "Sorted", "Starts", "Partial")}
            start_kernel(segment_kernel, (-(-num // SEGMENT), -(-width // block)), needed, {}, shape)
        grid = -(-num // LIMIT), -(-width // block)
        shape |= {"LIMIT": LIMIT, "ONTO": onto is not None}
        start_kernel(many_kernel, grid, tensors, {"scale": float(scale)}, shape)
    return out


def sum_by_position(values: Tensor, first: Tensor, reach: Tensor, num_positions: int) -> Tensor:
    """[num_positions, width] sum of the tokens' values at each position of the sequences, in float32 or better.

    Sequences come longest first: `first` are their first tokens, `reach` tells how many have a token at each position.
    """
    values = values.contiguous()
    width = values.shape[1]
    out = values.new_empty(num_positions, width, dtype=_wide(values.dtype))
    block = _block(width, 128)
    tensors = {"X": values, "First": first, "Reach": reach, "Out": out}
    shape = {"WIDTH": width, "BLOCK_D": block, "AT_ONCE": 32, "num_warps": 4}
    numbers = {"longest": reach.shape[0]}
    start_kernel(position_kernel, (num_positions, -(-width // block)), tensors, numbers, shape)
    return out


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _block(width: int, most: int) -> int:
    return min(most, max(16, 1 << (width - 1).bit_length()))
