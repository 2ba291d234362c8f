"""Triton kernels of jagged attention: the forward, and one backward kernel for each of keys, values and queries.

One program works on one tile of one sequence and one head and meets the tiles of the other side one after the other.
`Tiles` (see `plan.schedule`) says where; pairs that no mask touches run in a loop of their own without any masking.
Nothing is added across programs, so results do not depend on their order.
"""

# ruff: noqa: SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.attention.triton.tiles import (
    LOG2_E,
    TILE_FIELDS,
    half_scores,
    identity,
    masked_stages,
    own_tile,
    pair_number,
    read_row_sums,
    read_rows,
    score_index,
    tanh,
    visible,
    weights_and_slope,
    write_rows,
)


@triton.jit
def query_range(
    Tiles, tile, first, length, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LISTED: tl.constexpr
):
    """Key tiles that a query tile meets: full pairs from begin to middle, partly hidden ones from middle to end."""
    if LISTED:
        begin = tl.load(Tiles + tile * TILE_FIELDS + 3).to(tl.int32)
        middle = tl.load(Tiles + tile * TILE_FIELDS + 4).to(tl.int32)
        end = tl.load(Tiles + tile * TILE_FIELDS + 5).to(tl.int32)
        return begin, middle, end
    else:
        end = tl.cdiv(tl.minimum(first + BLOCK_M, length), BLOCK_N)
        return first * 0, first // BLOCK_N, end


@triton.jit
def softmax_step(h, out, top, total):
    """Bring running sums to a new highest score; scores in powers of two. Rows that see nothing yet stay at zero."""
    s = h * (2 * LOG2_E)
    new_top = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    p = tl.exp2(s - base[:, None])
    return p, out * shrink[:, None], new_top, total * shrink + tl.sum(p, 1)


@triton.jit
def forward_pair(
    q, out, top, total, eye, K, V, Visibility, Bias,
    k_row, v_row, k_head, v_head, half_alpha, window, prefix,
    start, length, history, store0, first, n0, key_head,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTMAX: tl.constexpr, BIAS: tl.constexpr, SQUARE: tl.constexpr, LISTED: tl.constexpr, VISIBILITY: tl.constexpr,
    FAST: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what one key tile gives to the output of a query tile."""
    k = read_rows(K, start, n0, key_head, k_row, k_head, length, WIDTH, BLOCK_D, BLOCK_N, not MASKED, TMA)
    v = read_rows(V, start, n0, key_head, v_row, v_head, length, V_WIDTH, BLOCK_V, BLOCK_N, not MASKED, TMA)
    h = half_scores(
        q, k, eye, Bias, store0, length, first, n0, half_alpha,
        BLOCK_M, BLOCK_N, BIAS, SQUARE, PRECISION, ACC, False,
    )  # fmt: skip
    if MASKED:
        seen = visible(
            first,
            n0,
            Visibility,
            start,
            length,
            history,
            window,
            prefix,
            BLOCK_M,
            BLOCK_N,
            LISTED,
            VISIBILITY,
            False,
        )
    if SOFTMAX:
        if MASKED:
            h = tl.where(seen, h, float("-inf"))
        p, out, top, total = softmax_step(h, out, top, total)
    else:
        if MASKED:
            h = tl.where(seen, h, 0.0)
        p = h + h * tanh(h, FAST)
    return tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION, out_dtype=ACC), top, total


@triton.jit
def forward_kernel(
    Q, K, V, Out, LogSum, Tiles, Pairs, Visibility, Bias,
    q_row, k_row, v_row, o_row, q_head, k_head, v_head, o_head,
    num_heads, half_alpha, scale, window, prefix: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SOFTMAX: tl.constexpr, BIAS: tl.constexpr, SQUARE: tl.constexpr, LISTED: tl.constexpr, VISIBILITY: tl.constexpr,
    FAST: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Attention of one query tile over the key tiles it meets."""
    tile, head, start, length, first, history, store0 = own_tile(Tiles, num_heads, BLOCK_M)
    begin, middle, end = query_range(Tiles, tile, first, length, BLOCK_M, BLOCK_N, LISTED)
    rows = first + tl.arange(0, BLOCK_M)
    key_head = head // GROUP
    q = read_rows(Q, start, first, head, q_row, q_head, length, WIDTH, BLOCK_D, BLOCK_M, False, TMA)
    eye = identity(BLOCK_N)
    out = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    top = tl.full([BLOCK_M], float("-inf"), ACC)
    total = tl.zeros([BLOCK_M], ACC)
    for n in tl.range(begin, middle, num_stages=STAGES):
        n0 = pair_number(Pairs, n, LISTED) * BLOCK_N
        out, top, total = forward_pair(
            q, out, top, total, eye, K, V, Visibility, Bias,
            k_row, v_row, k_head, v_head, half_alpha, window, prefix,
            start, length, history, store0, first, n0, key_head,
            WIDTH, V_WIDTH, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N,
            SOFTMAX, BIAS, SQUARE, LISTED, VISIBILITY, FAST, TMA, PRECISION, ACC, False,
        )  # fmt: skip
    for n in tl.range(middle, end, num_stages=masked_stages(STAGES, LISTED)):
        n0 = pair_number(Pairs, n, LISTED) * BLOCK_N
        out, top, total = forward_pair(
            q, out, top, total, eye, K, V, Visibility, Bias,
            k_row, v_row, k_head, v_head, half_alpha, window, prefix,
            start, length, history, store0, first, n0, key_head,
            WIDTH, V_WIDTH, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N,
            SOFTMAX, BIAS, SQUARE, LISTED, VISIBILITY, FAST, TMA, PRECISION, ACC, True,
        )  # fmt: skip
    if SOFTMAX:
        # A token that sees nothing gets zeros.
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        at = LogSum + (start + rows) * num_heads + head
        tl.store(at, top + tl.log2(total), mask=rows < length)
    else:
        out = out * scale
    write_rows(Out, out, start, first, head, o_row, o_head, length, V_WIDTH, BLOCK_V, BLOCK_M)


@triton.jit
def keys_pair(
    k, v, dk, dv, eye, Q, DO, LogSum, Delta, Visibility, Bias, Scores,
    q_row, do_row, q_head, do_head, num_heads, half_alpha, window, prefix,
    start, length, history, store0, first, m0, head,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTMAX: tl.constexpr, BIAS: tl.constexpr, SQUARE: tl.constexpr, LISTED: tl.constexpr, VISIBILITY: tl.constexpr,
    FAST: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr, KEEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what one query tile gives to the gradients of a key tile."""
    q = read_rows(Q, start, m0, head, q_row, q_head, length, WIDTH, BLOCK_D, BLOCK_M, not MASKED, TMA)
    do = read_rows(DO, start, m0, head, do_row, do_head, length, V_WIDTH, BLOCK_V, BLOCK_M, not MASKED, TMA)
    h = half_scores(
        q, k, eye, Bias, store0, length, m0, first, half_alpha,
        BLOCK_M, BLOCK_N, BIAS, SQUARE, PRECISION, ACC, True,
    )  # fmt: skip
    rows = m0 + tl.arange(0, BLOCK_M)
    log_sum = read_row_sums(LogSum, start, rows, head, num_heads, length, SOFTMAX)
    delta = read_row_sums(Delta, start, rows, head, num_heads, length, SOFTMAX)
    seen = h > 0
    if MASKED:
        seen = visible(
            m0,
            first,
            Visibility,
            start,
            length,
            history,
            window,
            prefix,
            BLOCK_M,
            BLOCK_N,
            LISTED,
            VISIBILITY,
            True,
        )
        if not LISTED:
            seen = seen & (rows[None, :] < length)
    if WANT_K:
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION, out_dtype=ACC)
    else:
        dp = h
    p, ds = weights_and_slope(h, dp, log_sum[None, :], delta[None, :], seen, SOFTMAX, FAST, MASKED)
    if WANT_V:
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION, out_dtype=ACC)
    if KEEP:
        at = score_index(store0, length, m0, first, head, num_heads, BLOCK_M, BLOCK_N, SQUARE)
        tl.store(Scores + at, tl.trans(ds.to(Scores.dtype.element_ty)))
    if WANT_K:
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION, out_dtype=ACC)
    return dk, dv


@triton.jit
def keys_backward_kernel(
    Q, K, V, DO, DK, DV, LogSum, Delta, Tiles, Pairs, Visibility, Bias, Scores,
    q_row, k_row, v_row, do_row, dk_row, dv_row, q_head, k_head, v_head, do_head, dk_head, dv_head,
    num_heads, half_alpha, dv_scale, dk_scale, window, prefix: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SOFTMAX: tl.constexpr, BIAS: tl.constexpr, SQUARE: tl.constexpr, LISTED: tl.constexpr, VISIBILITY: tl.constexpr,
    FAST: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    GROUP: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Gradients of one key tile: of the keys, the values, or both; of shared heads one part for each query head.

    Both at once saves a product, but at width 256 their sums do not fit into the registers together. The score
    gradients that KEEP asks for are those of every pair of tiles met here; beside them, memory stays as it is.
    """
    tile, head, start, length, first, history, store0 = own_tile(Tiles, num_heads, BLOCK_N)
    key_head = head // GROUP
    k = read_rows(K, start, first, key_head, k_row, k_head, length, WIDTH, BLOCK_D, BLOCK_N, False, TMA)
    v = k
    if WANT_K:
        v = read_rows(V, start, first, key_head, v_row, v_head, length, V_WIDTH, BLOCK_V, BLOCK_N, False, TMA)
    eye = identity(BLOCK_M)
    dk = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    dv = tl.zeros([BLOCK_N, BLOCK_V], ACC)
    # Under a mask, comparing everywhere takes less time than a second loop where there is a bias to fetch, too, and
    # fewer registers, of which wide heads have none left.
    ONE_LOOP: tl.constexpr = LISTED and (BIAS != "none" or BLOCK_D > 64)
    if LISTED:
        begin = tl.load(Tiles + tile * TILE_FIELDS + 3).to(tl.int32)
        end = tl.load(Tiles + tile * TILE_FIELDS + 4).to(tl.int32)
        last = tl.load(Tiles + tile * TILE_FIELDS + 5).to(tl.int32)
        num_masked = last - end
        num_diagonal = num_masked
        diagonal = end
        if ONE_LOOP:
            end = last
    else:
        # Masked are the tiles on the diagonal and the last one, where it reaches beyond the sequence.
        diagonal = first // BLOCK_M
        begin = tl.minimum(tl.cdiv(first + BLOCK_N, BLOCK_M), tl.cdiv(length, BLOCK_M))
        end = tl.maximum(length // BLOCK_M, begin)
        num_diagonal = begin - diagonal
        num_masked = num_diagonal + (length > end * BLOCK_M).to(tl.int32)
    if not ONE_LOOP:
        for n in tl.range(0, num_masked, num_stages=masked_stages(STAGES, LISTED)):
            m0 = pair_number(Pairs, tl.where(n < num_diagonal, diagonal + n, end), LISTED) * BLOCK_M
            dk, dv = keys_pair(
                k, v, dk, dv, eye, Q, DO, LogSum, Delta, Visibility, Bias, Scores,
                q_row, do_row, q_head, do_head, num_heads, half_alpha, window, prefix,
                start, length, history, store0, first, m0, head,
                WIDTH, V_WIDTH, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N,
                SOFTMAX, BIAS, SQUARE, LISTED, VISIBILITY, FAST, TMA, PRECISION, ACC, WANT_K, WANT_V, KEEP, True,
            )  # fmt: skip
    for n in tl.range(begin, end, num_stages=STAGES):
        m0 = pair_number(Pairs, n, LISTED) * BLOCK_M
        dk, dv = keys_pair(
            k, v, dk, dv, eye, Q, DO, LogSum, Delta, Visibility, Bias, Scores,
            q_row, do_row, q_head, do_head, num_heads, half_alpha, window, prefix,
            start, length, history, store0, first, m0, head,
            WIDTH, V_WIDTH, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N,
            SOFTMAX, BIAS, SQUARE, LISTED, VISIBILITY, FAST, TMA, PRECISION, ACC, WANT_K, WANT_V, KEEP, ONE_LOOP,
        )  # fmt: skip
    if WANT_K:
        write_rows(DK, dk * dk_scale, start, first, head, dk_row, dk_head, length, WIDTH, BLOCK_D, BLOCK_N)
    if WANT_V:
        write_rows(DV, dv * dv_scale, start, first, head, dv_row, dv_head, length, V_WIDTH, BLOCK_V, BLOCK_N)


@triton.jit
def queries_pair(
    q, do, dq, eye, log_sum, delta, K, V, Visibility, Bias,
    k_row, v_row, k_head, v_head, half_alpha, window, prefix,
    start, length, history, store0, first, n0, key_head,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTMAX: tl.constexpr, BIAS: tl.constexpr, SQUARE: tl.constexpr, LISTED: tl.constexpr, VISIBILITY: tl.constexpr,
    FAST: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what one key tile gives to the gradient of a query tile."""
    k = read_rows(K, start, n0, key_head, k_row, k_head, length, WIDTH, BLOCK_D, BLOCK_N, not MASKED, TMA)
    v = read_rows(V, start, n0, key_head, v_row, v_head, length, V_WIDTH, BLOCK_V, BLOCK_N, not MASKED, TMA)
    h = half_scores(
        q, k, eye, Bias, store0, length, first, n0, half_alpha,
        BLOCK_M, BLOCK_N, BIAS, SQUARE, PRECISION, ACC, False,
    )  # fmt: skip
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
    seen = h > 0
    if MASKED:
        seen = visible(
            first,
            n0,
            Visibility,
            start,
            length,
            history,
            window,
            prefix,
            BLOCK_M,
            BLOCK_N,
            LISTED,
            VISIBILITY,
            False,
        )
    _, ds = weights_and_slope(h, dp, log_sum[:, None], delta[:, None], seen, SOFTMAX, FAST, MASKED)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def queries_backward_kernel(
    Q, K, V, DO, DQ, LogSum, Delta, Tiles, Pairs, Visibility, Bias,
    q_row, k_row, v_row, do_row, dq_row, q_head, k_head, v_head, do_head, dq_head,
    num_heads, half_alpha, dq_scale, window, prefix: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SOFTMAX: tl.constexpr, BIAS: tl.constexpr, SQUARE: tl.constexpr, LISTED: tl.constexpr, VISIBILITY: tl.constexpr,
    FAST: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Gradient of one query tile."""
    tile, head, start, length, first, history, store0 = own_tile(Tiles, num_heads, BLOCK_M)
    begin, middle, end = query_range(Tiles, tile, first, length, BLOCK_M, BLOCK_N, LISTED)
    rows = first + tl.arange(0, BLOCK_M)
    key_head = head // GROUP
    q = read_rows(Q, start, first, head, q_row, q_head, length, WIDTH, BLOCK_D, BLOCK_M, False, TMA)
    do = read_rows(DO, start, first, head, do_row, do_head, length, V_WIDTH, BLOCK_V, BLOCK_M, False, TMA)
    log_sum = read_row_sums(LogSum, start, rows, head, num_heads, length, SOFTMAX)
    delta = read_row_sums(Delta, start, rows, head, num_heads, length, SOFTMAX)
    eye = identity(BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    for n in tl.range(begin, middle, num_stages=STAGES):
        n0 = pair_number(Pairs, n, LISTED) * BLOCK_N
        dq = queries_pair(
            q, do, dq, eye, log_sum, delta, K, V, Visibility, Bias,
            k_row, v_row, k_head, v_head, half_alpha, window, prefix,
            start, length, history, store0, first, n0, key_head,
            WIDTH, V_WIDTH, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N,
            SOFTMAX, BIAS, SQUARE, LISTED, VISIBILITY, FAST, TMA, PRECISION, ACC, False,
        )  # fmt: skip
    for n in tl.range(middle, end, num_stages=masked_stages(STAGES, LISTED)):
        n0 = pair_number(Pairs, n, LISTED) * BLOCK_N
        dq = queries_pair(
            q, do, dq, eye, log_sum, delta, K, V, Visibility, Bias,
            k_row, v_row, k_head, v_head, half_alpha, window, prefix,
            start, length, history, store0, first, n0, key_head,
            WIDTH, V_WIDTH, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N,
            SOFTMAX, BIAS, SQUARE, LISTED, VISIBILITY, FAST, TMA, PRECISION, ACC, True,
        )  # fmt: skip
    write_rows(DQ, dq * dq_scale, start, first, head, dq_row, dq_head, length, WIDTH, BLOCK_D, BLOCK_M)
