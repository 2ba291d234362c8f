"""Triton kernels of keyed dropout: the keys of a batch's tokens, and numbers kept or dropped by them.

The key of the step is read from memory, not built in: a recorded step can be played again under another key.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.dropout import constants

GOLDEN = tl.constexpr(constants.GOLDEN)
LEFT = tl.constexpr(constants.LEFT)
RIGHT = tl.constexpr(constants.RIGHT)
COLUMN = tl.constexpr(constants.COLUMN)
FIRST = tl.constexpr(constants.FIRST)
SECOND = tl.constexpr(constants.SECOND)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * LEFT
    x = (x ^ (x >> 27)) * RIGHT
    return x ^ (x >> 31)


@triton.jit
def kept(keys, columns, site, THRESHOLD: tl.constexpr):
    """[rows, columns] whether each number is kept; `keys` are those of the rows."""
    key = _mix(keys.to(tl.uint64) + (site.to(tl.uint64) + 1) * GOLDEN)
    low = (key & 0xFFFFFFFF).to(tl.uint32)[:, None]
    high = (key >> 32).to(tl.uint32)[:, None]
    h = low + (columns.to(tl.uint32) * COLUMN)[None, :]
    h = (h ^ (h >> 16)) * FIRST
    h = h ^ high
    h = (h ^ (h >> 15)) * SECOND
    h = h ^ (h >> 16)
    return h >= THRESHOLD


@triton.jit
def token_keys_kernel(Step, Samples, Tiles, Offsets, Out, BLOCK: tl.constexpr):
    """The keys of a tile's tokens. Tiles holds (sequence, first token, number of tokens)."""
    tile = Tiles + tl.program_id(0) * 3
    sequence, first = tl.load(tile), tl.load(tile + 1)
    start = tl.load(Offsets + sequence)
    numbers = tl.arange(0, BLOCK)
    step = tl.load(Step).to(tl.uint64)
    sample = _mix(step + (tl.load(Samples + sequence).to(tl.uint64) + 1) * GOLDEN)
    key = _mix(sample + ((first - start + numbers).to(tl.uint64) + 1) * GOLDEN)
    tl.store(Out + first + numbers, key.to(tl.int64), mask=numbers < tl.load(tile + 2))


@triton.jit(do_not_specialize=["num_rows", "site"])
def dropout_kernel(
    X, Keys, Out, x_row, num_rows, site,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Out = SCALE * x where it is kept, else 0; rows and blocks of columns."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = rows < num_rows
    inside = real[:, None] & (columns[None, :] < WIDTH)
    x = tl.load(X + rows[:, None] * x_row + columns[None, :], mask=inside, other=0.0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    keep = kept(tl.load(Keys + rows, mask=real, other=0), columns, site, THRESHOLD)
    out = tl.where(keep, x * SCALE, 0.0)
    tl.store(Out + rows[:, None] * WIDTH + columns[None, :], out.to(Out.dtype.element_ty), mask=inside)
