"""Triton kernel of cached requests: new tokens over what is kept of their user's history, and over each other.

Few queries meet few keys, so one program does all of a user and head that fits into a tile. Cached keys are read where
they lie, each user's from its own address. Distances are between positions, since cached tokens do not stand
where they stood in the history. Rows of `Tiles` are those of `cached_attention.CachedPlan`. Candidates, many of which
meet the same keys, have kernels of their own (`candidate_kernel`).
"""

# ruff: noqa: SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.triton.attention_kernels import softmax_step
from freescale.kernels.attention.triton.tiles import read_rows, tanh, write_rows

FIELDS = tl.constexpr(9)


@triton.jit
def add_keys(
    q, out, top, total, K, V, k_row, k_head, v_row, v_head, start, n0, count, key_head,
    rows, row_positions, key_positions, seen, Position, Time, Buckets, bucket0, bucket_row, bucket_column, half_alpha,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTMAX: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add what one tile of keys gives to the output of a tile of queries; `seen` says which pairs count."""
    k = read_rows(K, start, n0, key_head, k_row, k_head, count, WIDTH, BLOCK_D, BLOCK_N, False, False)
    v = read_rows(V, start, n0, key_head, v_row, v_head, count, V_WIDTH, BLOCK_V, BLOCK_N, False, False)
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION, out_dtype=ACC) * (2 * half_alpha)
    if HAS_POSITION:
        distance = tl.maximum(row_positions[:, None] - key_positions[None, :], 0)
        s += tl.load(Position + distance, mask=seen, other=0.0).to(ACC)
    if HAS_TIME:
        keys = bucket_column + n0 + tl.arange(0, BLOCK_N)
        at = Buckets + bucket0 + rows[:, None] * bucket_row + keys[None, :]
        s += tl.load(Time + tl.load(at, mask=seen, other=0).to(tl.int32)).to(ACC)
    h = s * 0.5
    if SOFTMAX:
        p, out, top, total = softmax_step(tl.where(seen, h, float("-inf")), out, top, total)
    else:
        p = tl.where(seen, h + h * tanh(h, FAST), 0.0)
    out = tl.dot(p.to(q.dtype), v.to(q.dtype), out, input_precision=PRECISION, out_dtype=ACC)
    return out, top, total


@triton.jit
def cached_kernel(
    Q, K, V, CachedK, CachedV, Out, Tiles, Positions, Position, Time, Buckets,
    q_row, k_row, v_row, ck_row, cv_row, o_row, q_head, k_head, v_head, ck_head, cv_head, o_head,
    num_heads, half_alpha, scale,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTMAX: tl.constexpr, HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of new tokens over the cached tokens and the new ones up to themselves."""
    tile = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    start = tl.load(Tiles + tile * FIELDS)
    length = tl.load(Tiles + tile * FIELDS + 1).to(tl.int32)
    first = tl.load(Tiles + tile * FIELDS + 2).to(tl.int32)
    cached_start = tl.load(Tiles + tile * FIELDS + 3)
    cached = tl.load(Tiles + tile * FIELDS + 4).to(tl.int32)
    position = tl.load(Tiles + tile * FIELDS + 5).to(tl.int32)
    bucket0 = tl.load(Tiles + tile * FIELDS + 6)
    bucket_row = tl.load(Tiles + tile * FIELDS + 7).to(tl.int32)
    ahead = tl.load(Tiles + tile * FIELDS + 8).to(tl.int32)
    key_head = head // GROUP
    rows = first + tl.arange(0, BLOCK_M)
    row_positions = position + rows
    q = read_rows(Q, start, first, head, q_row, q_head, length, WIDTH, BLOCK_D, BLOCK_M, False, False)
    out = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    top = tl.full([BLOCK_M], float("-inf"), ACC)
    total = tl.zeros([BLOCK_M], ACC)
    for n0 in range(0, cached, BLOCK_N):
        keys = n0 + tl.arange(0, BLOCK_N)
        key_positions = tl.load(Positions + cached_start + keys, mask=keys < cached, other=0).to(tl.int32)
        seen = (keys[None, :] < cached) & (rows[:, None] < length)
        out, top, total = add_keys(
            q, out, top, total, CachedK, CachedV, ck_row, ck_head, cv_row, cv_head,
            cached_start, n0, cached, key_head,
            rows, row_positions, key_positions, seen, Position, Time, Buckets, bucket0, bucket_row, 0, half_alpha,
            WIDTH, V_WIDTH, BLOCK_D, BLOCK_V, BLOCK_N, SOFTMAX, HAS_POSITION, HAS_TIME, FAST, PRECISION, ACC,
        )  # fmt: skip
    for n0 in range(0, tl.minimum(first + BLOCK_M, length), BLOCK_N):
        keys = n0 + tl.arange(0, BLOCK_N)
        seen = (keys[None, :] <= rows[:, None]) & (rows[:, None] < length)
        out, top, total = add_keys(
            q, out, top, total, K, V, k_row, k_head, v_row, v_head,
            start, n0, length, key_head,
            rows, row_positions, position + keys, seen,
            Position, Time, Buckets, bucket0, bucket_row, ahead, half_alpha,
            WIDTH, V_WIDTH, BLOCK_D, BLOCK_V, BLOCK_N, SOFTMAX, HAS_POSITION, HAS_TIME, FAST, PRECISION, ACC,
        )  # fmt: skip
    if SOFTMAX:
        # Rows beyond the user's tokens have seen nothing and are not written.
        out = out / tl.where(rows < length, total, 1.0)[:, None]
    else:
        out = out * scale
    write_rows(Out, out, start, first, head, o_row, o_head, length, V_WIDTH, BLOCK_V, BLOCK_M)
