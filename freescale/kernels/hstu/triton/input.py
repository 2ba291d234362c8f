"""Triton kernel that makes the input of an encoder: item vectors gathered and scaled, positions added."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def input_kernel(
    Rows, Index, Position, Tiles, Offsets, Out, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some tokens of a tile. Tiles holds (sequence, first token, number of tokens), so a token's position is known."""
    tile = Tiles + tl.program_id(0) * 3
    start = tl.load(Offsets + tl.load(tile))
    numbers = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tokens = tl.load(tile + 1) + numbers
    real = numbers < tl.load(tile + 2)
    columns = tl.arange(0, BLOCK)
    inside = real[:, None] & (columns[None, :] < WIDTH)
    index = tl.load(Index + tokens, mask=real, other=0).to(tl.int64)
    row = tl.load(Rows + index[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    at = Position + (tokens - start)[:, None] * WIDTH + columns[None, :]
    out = row * scale + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    to = Out + tokens[:, None].to(tl.int64) * WIDTH + columns[None, :]
    tl.store(to, out.to(Out.dtype.element_ty), mask=inside)
