"""Triton kernels that sort out which values belong to which row, and gather rows straight from their table.

Nothing here waits for the device: what the host would have to ask for (how many rows are unique, whether one lies
outside the table) stays there. A row outside the table gets the key `num_rows`, which stands for no row: it is read as
zeros and never written. The kernel that meets one writes it into `bad`, in memory of the host, which looks there later.
"""

# mypy: ignore-errors

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from freescale.kernels.rows.plan import RowPlan
from freescale.kernels.runtime import CachedLauncher

# Keys that one program goes through.
BLOCK = 4096
# Up to so many blocks, each counts the rows before it by itself.
COUNTED_AGAIN = 32
# Row numbers above do not fit keys of 32 bits, of which a sort takes half the passes.
MOST_ROWS_32 = 2**31 - 2


@triton.jit
def _checked(Ids, Bad, n, count, num_rows, TELL: tl.constexpr):
    """Row numbers, and which of them are rows; one that is not is told, unless it has been already."""
    ids = tl.load(Ids + n, mask=n < count, other=0).to(tl.int64)
    good = (ids >= 0) & (ids < num_rows)
    if TELL:
        tl.store(Bad + tl.zeros_like(ids), ids, mask=(n < count) & (good == 0))
    return ids, good


@triton.jit(do_not_specialize=["count", "num_rows"])
def keys_kernel(Ids, Keys, Bad, count, num_rows, BLOCK: tl.constexpr):
    """Keys of row numbers."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids, good = _checked(Ids, Bad, n, count, num_rows, True)
    tl.store(Keys + n, tl.where(good, ids, num_rows).to(Keys.dtype.element_ty), mask=n < count)


@triton.jit(do_not_specialize=["count", "num_rows"])
def gather_kernel(
    Ids, Weight, Keys, Bad, Out, count, num_rows,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, MAKE_KEYS: tl.constexpr,
):  # fmt: skip
    """Rows of the table, and on the way the keys of their numbers."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    ids, good = _checked(Ids, Bad, n, count, num_rows, MAKE_KEYS)
    inside = columns[None, :] < WIDTH
    real = good & (n < count)
    values = tl.load(Weight + ids[:, None] * WIDTH + columns[None, :], mask=real[:, None] & inside, other=0.0)
    if MAKE_KEYS:
        tl.store(Keys + n, tl.where(good, ids, num_rows).to(Keys.dtype.element_ty), mask=n < count)
    to = Out + n[:, None] * WIDTH + columns[None, :]
    tl.store(to, values.to(Out.dtype.element_ty), mask=(n < count)[:, None] & inside)


@triton.jit
def _heads(Sorted, n, count):
    """Where in sorted keys another row begins."""
    key = tl.load(Sorted + n, mask=n < count, other=0)
    before = tl.load(Sorted + n - 1, mask=(n < count) & (n > 0), other=0)
    return key, ((n < count) & ((n == 0) | (key != before))).to(tl.int32)


@triton.jit(do_not_specialize=["count", "capacity"])
def pad_kernel(Keys, Padded, Real, count, capacity, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """Keys to where recorded kernels read them, keys behind all others after them, and how many are real."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(Keys + n, mask=n < count, other=LAST)
    tl.store(Padded + n, keys, mask=n < capacity)
    tl.store(Real + tl.zeros_like(n), count + tl.zeros_like(n), mask=n == 0)


@triton.jit(do_not_specialize=["count"])
def count_heads_kernel(Sorted, Heads, Real, count, READ: tl.constexpr, BLOCK: tl.constexpr):
    """How many rows begin in each block of keys."""
    if READ:
        count = tl.load(Real)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, heads = _heads(Sorted, n, count)
    tl.store(Heads + tl.program_id(0), tl.sum(heads, 0))


@triton.jit(do_not_specialize=["count"])
def write_plan_kernel(
    Sorted, Heads, Rows, Starts, Index, Count, Real, count,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, COUNTED: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Rows, where their values begin, and the number of each value's row; every block adds up those before it.

    Few keys are counted again by every block, which takes less time than the start of a kernel that counts.
    """
    if READ:
        count = tl.load(Real)
    block = tl.program_id(0)
    numbers = tl.arange(0, AT_ONCE)
    earlier = tl.zeros([AT_ONCE], tl.int32)
    if COUNTED:
        for first in range(0, block, AT_ONCE):
            earlier += tl.load(Heads + first + numbers, mask=first + numbers < block, other=0)
    else:
        for first in range(0, block * BLOCK, AT_ONCE):
            _, before = _heads(Sorted, first + numbers, count)
            earlier += before
    n = block * BLOCK + tl.arange(0, BLOCK)
    key, heads = _heads(Sorted, n, count)
    row = tl.sum(earlier, 0) + tl.cumsum(heads, 0) - 1
    tl.store(Index + n, row, mask=n < count)
    tl.store(Rows + row, key, mask=heads > 0)
    tl.store(Starts + row, n, mask=heads > 0)
    last = n == count - 1
    tl.store(Starts + row + 1, n + 1, mask=last)
    tl.store(Count + tl.zeros_like(n), row + 1, mask=last)


@cache
def _keys() -> CachedLauncher:
    return CachedLauncher(
        keys_kernel, ("Ids", "Keys", "Bad"), ("count", "num_rows"), {"BLOCK": 1024, "num_warps": 4}
    )


@cache
def _keys_64() -> CachedLauncher:
    # A launcher of its own: num_rows is passed as a longer number.
    return CachedLauncher(
        keys_kernel, ("Ids", "Keys", "Bad"), ("count", "num_rows"), {"BLOCK": 1024, "num_warps": 4}
    )


@cache
def _gather(width: int, make_keys: bool, wide: bool) -> CachedLauncher:
    block = max(16, 1 << (width - 1).bit_length())
    shape = {"WIDTH": width, "BLOCK_D": block, "ROWS": max(1, 2048 // block), "MAKE_KEYS": make_keys}
    tensors = ("Ids", "Weight", "Keys", "Bad", "Out")
    return CachedLauncher(gather_kernel, tensors, ("count", "num_rows"), {**shape, "num_warps": 4})


@cache
def _padding(dtype: torch.dtype) -> CachedLauncher:
    constants = {"LAST": torch.iinfo(dtype).max, "BLOCK": 1024, "num_warps": 4}
    return CachedLauncher(pad_kernel, ("Keys", "Padded", "Real"), ("count", "capacity"), constants)


@cache
def _counting(read: bool) -> CachedLauncher:
    shape = {"BLOCK": BLOCK, "READ": read, "num_warps": 8}
    return CachedLauncher(count_heads_kernel, ("Sorted", "Heads", "Real"), ("count",), shape)


@cache
def _writing(counted: bool, read: bool) -> CachedLauncher:
    shape = {"BLOCK": BLOCK, "AT_ONCE": 1024 if counted else BLOCK, "COUNTED": counted, "READ": read}
    tensors = ("Sorted", "Heads", "Rows", "Starts", "Index", "Count", "Real")
    return CachedLauncher(write_plan_kernel, tensors, ("count",), {**shape, "num_warps": 8})


def key_type(num_rows: int) -> torch.dtype:
    """Of the keys of a table."""
    return torch.int32 if num_rows <= MOST_ROWS_32 else torch.int64


def make_keys(ids: Tensor, num_rows: int, bad: Tensor) -> Tensor:
    """[N] the key of each row number."""
    ids = ids.contiguous().view(-1)
    keys = torch.empty(len(ids), dtype=key_type(num_rows), device=ids.device)
    if len(ids):
        launcher = _keys() if keys.dtype == torch.int32 else _keys_64()
        launcher.start((-(-len(ids) // 1024),), (ids, keys, bad), (len(ids), num_rows))
    return keys


def gather(weight: Tensor, ids: Tensor, bad: Tensor, *, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[N, dim] rows of the table in float32, and [N] their keys, which are made unless they are there already."""
    num_rows, width = weight.shape
    source = ids.contiguous().view(-1) if keys is None else keys
    (count,) = source.shape
    made = torch.empty(count, dtype=key_type(num_rows), device=source.device) if keys is None else keys
    out = torch.empty(count, width, dtype=torch.float32, device=source.device)
    if count:
        launcher = _gather(width, keys is None, num_rows > MOST_ROWS_32)
        rows = max(1, 2048 // max(16, 1 << (width - 1).bit_length()))
        launcher.start((-(-count // rows),), (source, weight, made, bad, out), (count, num_rows))
    return out, made


def pad_keys(keys: Tensor, padded: Tensor, real: Tensor) -> None:
    """Keys into memory with room for more of them, and their number into [1] `real`, for `make_plan`."""
    capacity = len(padded)
    _padding(keys.dtype).start((-(-capacity // 1024),), (keys, padded, real), (len(keys), capacity))


def make_plan(keys: Tensor, *, real: Tensor | None = None) -> RowPlan:
    """The plan of these keys; the host learns nothing and waits for nothing.

    `real`: of `pad_keys`; read when the kernels run, so they can be recorded and replayed.
    """
    (count,) = keys.shape
    blocks = -(-count // BLOCK)
    # One piece of memory, parts that begin at multiples of four numbers: kernels are compiled for tensors that do.
    sizes = [*(-(-size // 4) * 4 for size in (count + 1, count, blocks)), 1]
    room = torch.empty(sum(sizes), dtype=torch.int32, device=keys.device)
    starts, index, heads, num = torch.split_with_sizes(room, sizes)
    rows = torch.empty_like(keys)
    ordered, order = keys.sort(stable=True)
    if not count:
        starts.zero_()
        num.zero_()
        return RowPlan(order, rows, starts, index, num, keys)
    read = real is not None
    # Recorded, the kernel that counts costs no start worth the name.
    counted = blocks > (1 if read else COUNTED_AGAIN)
    number = num if real is None else real
    if counted:
        _counting(read).start((blocks,), (ordered, heads, number), (count,))
    writing = _writing(counted, read)
    writing.start((blocks,), (ordered, heads, rows, starts, index, num, number), (count,))
    return RowPlan(order, rows, starts, index, num, keys)
