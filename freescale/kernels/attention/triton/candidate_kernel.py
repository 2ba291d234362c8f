"""Triton kernels of candidates over cached histories: many queries of one user over the same long keys.

All candidates of a request stand at one position and are asked for at one time. So what position and time add to a
score depends on the key alone: a row a request, made once a layer, instead of a number for every pair. And a thousand
candidates of one user leave half of a GPU idle, so keys are cut into parts that programs of their own add up: sums
of SiLU weights need nothing of each other. They are brought together in a fixed order.
Rows of `Tiles` are those of `candidates.CandidatePlan`.
"""

# ruff: noqa: SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.triton.attention_kernels import softmax_step
from freescale.kernels.attention.triton.tiles import LOG2_E, read_rows, tanh, write_rows

FIELDS = tl.constexpr(9)


@triton.jit(do_not_specialize=["size"])
def bias_row_kernel(
    Out, Distances, Buckets, Position, Time, size, last_position,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Half of what position and time add to the score of each key."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.zeros([BLOCK], Out.dtype.element_ty)
    if HAS_POSITION:
        distance = tl.minimum(tl.load(Distances + at, mask=inside, other=0), last_position)
        value += tl.load(Position + distance, mask=inside, other=0.0).to(value.dtype)
    if HAS_TIME:
        bucket = tl.load(Buckets + at, mask=inside, other=0).to(tl.int32)
        value += tl.load(Time + bucket, mask=inside, other=0.0).to(value.dtype)
    tl.store(Out + at, value * 0.5, mask=inside)


@triton.jit
def add_keys(
    q, out, top, total, K, V, k_row, k_head, v_row, v_head, start, n0, end, key_head, Bias, bias0, half_alpha,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add what one tile of keys, that every query sees, gives to a tile of queries."""
    k = read_rows(K, start, n0, key_head, k_row, k_head, end, WIDTH, BLOCK_D, BLOCK_N, not MASKED, False)
    v = read_rows(V, start, n0, key_head, v_row, v_head, end, V_WIDTH, BLOCK_V, BLOCK_N, not MASKED, False)
    keys = n0 + tl.arange(0, BLOCK_N)
    h = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION, out_dtype=ACC) * half_alpha
    if HAS_BIAS:
        if MASKED:
            bias = tl.load(Bias + bias0 + keys, mask=keys < end, other=0.0)
        else:
            bias = tl.load(Bias + bias0 + keys)
        h += bias[None, :]
    if SOFTMAX:
        if MASKED:
            h = tl.where(keys[None, :] < end, h, float("-inf"))
        p, out, top, total = softmax_step(h, out, top, total)
    else:
        # Beyond the end keys and bias were read as zeros, whose weight is zero.
        p = h + h * tanh(h, FAST)
    out = tl.dot(p.to(q.dtype), v.to(q.dtype), out, input_precision=PRECISION, out_dtype=ACC)
    return out, top, total


@triton.jit(do_not_specialize=["split_stride"])
def candidate_kernel(
    Q, K, V, CachedK, CachedV, Out, Tiles, Bias,
    q_row, k_row, v_row, ck_row, cv_row, o_row, q_head, k_head, v_head, ck_head, cv_head, o_head,
    num_heads, split_stride, half_alpha, scale,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of candidates over a part of the cached keys; the last part has the rest and themselves."""
    number = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    tile = number // num_heads
    head = number % num_heads
    start = tl.load(Tiles + tile * FIELDS)
    events = tl.load(Tiles + tile * FIELDS + 1).to(tl.int32)
    length = events + tl.load(Tiles + tile * FIELDS + 2).to(tl.int32)
    first = events + tl.load(Tiles + tile * FIELDS + 3).to(tl.int32)
    cached_start = tl.load(Tiles + tile * FIELDS + 4)
    cached = tl.load(Tiles + tile * FIELDS + 5).to(tl.int32)
    # The compiler cannot see that rows begin at whole blocks.
    bias0 = tl.multiple_of(tl.load(Tiles + tile * FIELDS + 6), 16)
    event_bias = tl.load(Tiles + tile * FIELDS + 7)
    own_bias = tl.load(Tiles + tile * FIELDS + 8)
    key_head = head // GROUP
    q = read_rows(Q, start, first, head, q_row, q_head, length, WIDTH, BLOCK_D, BLOCK_M, False, False)
    out = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    top = tl.full([BLOCK_M], float("-inf"), ACC)
    total = tl.zeros([BLOCK_M], ACC)
    each = tl.cdiv(tl.cdiv(cached, BLOCK_N), SPLITS) * BLOCK_N
    begin = tl.minimum(split * each, cached)
    end = tl.minimum(begin + each, cached)
    whole = begin + (end - begin) // BLOCK_N * BLOCK_N
    for n0 in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
        out, top, total = add_keys(
            q, out, top, total, CachedK, CachedV, ck_row, ck_head, cv_row, cv_head,
            cached_start, n0, end, key_head, Bias, bias0, half_alpha,
            WIDTH, V_WIDTH, BLOCK_D, BLOCK_V, BLOCK_N, SOFTMAX, HAS_BIAS, FAST, PRECISION, ACC, False,
        )  # fmt: skip
    if whole < end:
        out, top, total = add_keys(
            q, out, top, total, CachedK, CachedV, ck_row, ck_head, cv_row, cv_head,
            cached_start, whole, end, key_head, Bias, bias0, half_alpha,
            WIDTH, V_WIDTH, BLOCK_D, BLOCK_V, BLOCK_N, SOFTMAX, HAS_BIAS, FAST, PRECISION, ACC, True,
        )  # fmt: skip
    if split == SPLITS - 1:
        for n0 in tl.range(0, events, BLOCK_N, num_stages=1):
            out, top, total = add_keys(
                q, out, top, total, K, V, k_row, k_head, v_row, v_head,
                start, n0, events, key_head, Bias, event_bias, half_alpha,
                WIDTH, V_WIDTH, BLOCK_D, BLOCK_V, BLOCK_N, SOFTMAX, HAS_BIAS, FAST, PRECISION, ACC, True,
            )  # fmt: skip
        k = read_rows(K, start, first, key_head, k_row, k_head, length, WIDTH, BLOCK_D, BLOCK_M, False, False)
        v = read_rows(
            V, start, first, key_head, v_row, v_head, length, V_WIDTH, BLOCK_V, BLOCK_M, False, False
        )
        own = tl.sum(q.to(ACC) * k.to(ACC), 1) * half_alpha
        if HAS_BIAS:
            own += tl.load(Bias + own_bias)
        if SOFTMAX:
            s = own * (2 * LOG2_E)
            new_top = tl.maximum(top, s)
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(s - new_top)
            out = out * shrink[:, None] + weight[:, None] * v.to(ACC)
            total = total * shrink + weight
        else:
            weight = own + own * tanh(own, FAST)
            out += weight[:, None] * v.to(ACC)
    if SOFTMAX:
        out = out / total[:, None]
    else:
        out = out * scale
    part = Out + split.to(tl.int64) * tl.multiple_of(split_stride, 16)
    write_rows(part, out, start, first, head, o_row, o_head, length, V_WIDTH, BLOCK_V, BLOCK_M)


@triton.jit(do_not_specialize=["split_stride"])
def add_splits_kernel(
    Parts, Out, Tiles, o_row, o_head, p_row, p_head, num_heads, split_stride,
    V_WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The parts of some candidates of a tile, added up in order."""
    tile = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    start = tl.load(Tiles + tile * FIELDS)
    events = tl.load(Tiles + tile * FIELDS + 1).to(tl.int32)
    length = events + tl.load(Tiles + tile * FIELDS + 2).to(tl.int32)
    first = events + tl.load(Tiles + tile * FIELDS + 3).to(tl.int32) + tl.program_id(1) * ROWS
    # A tile's rows end where the next tile's begin.
    out = read_rows(Parts, start, first, head, p_row, p_head, length, V_WIDTH, BLOCK_V, ROWS, False, False)
    for split in tl.static_range(1, SPLITS):
        part = Parts + split * tl.multiple_of(split_stride, 16).to(tl.int64)
        out += read_rows(
            part, start, first, head, p_row, p_head, length, V_WIDTH, BLOCK_V, ROWS, False, False
        )
    write_rows(Out, out, start, first, head, o_row, o_head, length, V_WIDTH, BLOCK_V, ROWS)
