"""Pieces of the Triton attention kernels: tiles in and out, scores with bias, what is seen, SiLU and its slope.

With h = (alpha q k^T + bias) / 2 and t = tanh(h):

    SiLU(2h)  = h (1 + t)                    one special-function instruction a pair instead of two
    SiLU'(2h) = ((1 + t) + h (1 - t^2)) / 2

Argument names: X_row and X_head are strides; capitals are pointers, tensor descriptors or compile-time constants.
"""

# ruff: noqa: D103, SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(8)
BIAS_ROWS = tl.constexpr(128)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """The hardware's tanh has an error of 2^-11: below the rounding of half precision, above that of float32."""
    if FAST:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def own_tile(Tiles, num_heads, BLOCK: tl.constexpr):
    """The tile and head of this program, and what the work list says of them."""
    tile = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    start = tl.load(Tiles + tile * TILE_FIELDS)
    length = tl.load(Tiles + tile * TILE_FIELDS + 1).to(tl.int32)
    first = tl.load(Tiles + tile * TILE_FIELDS + 2).to(tl.int32) * BLOCK
    history = tl.load(Tiles + tile * TILE_FIELDS + 6).to(tl.int32)
    store0 = tl.load(Tiles + tile * TILE_FIELDS + 7)
    return tile, head, start, length, first, history, store0


@triton.jit
def read_rows(
    X, start, first, head, row_stride, head_stride, length,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, INSIDE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Tokens `first` to `first + ROWS` of a sequence, [ROWS, BLOCK]; INSIDE: all of them belong to it.

    Beyond the sequence a descriptor reads its neighbour, which must be masked; pointers read zeros.
    """
    if TMA:
        return X.load([(start + first).to(tl.int32), head * WIDTH])
    else:
        rows = first + tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK)
        at = X + start * row_stride + head * head_stride + rows[:, None] * row_stride + columns[None, :]
        if BLOCK == WIDTH:
            if INSIDE:
                return tl.load(at)
            else:
                return tl.load(at, mask=rows[:, None] < length, other=0.0)
        else:
            return tl.load(at, mask=(rows[:, None] < length) & (columns[None, :] < WIDTH), other=0.0)


@triton.jit
def write_rows(
    X, x, start, first, head, row_stride, head_stride, length,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    at = X + start * row_stride + head * head_stride + rows[:, None] * row_stride + columns[None, :]
    inside = (rows[:, None] < length) & (columns[None, :] < WIDTH)
    tl.store(at, x.to(X.dtype.element_ty), mask=inside)


@triton.jit
def bias_rows(store0, length, i0, SQUARE: tl.constexpr):
    """Where the bias of the block with query i0 starts, and how wide its rows are; see `BiasStore`."""
    block = (i0 // BIAS_ROWS).to(tl.int64)
    if SQUARE:
        blocks = tl.cdiv(length, BIAS_ROWS).to(tl.int64)
        return (store0 + block * blocks) * (BIAS_ROWS * BIAS_ROWS), blocks * BIAS_ROWS
    else:
        return (store0 + block * (block + 1) // 2) * (BIAS_ROWS * BIAS_ROWS), (block + 1) * BIAS_ROWS


@triton.jit
def read_bias(Bias, store0, length, i0, j0, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr):
    """Bias of queries i0 on and keys j0 on, [ROWS, COLUMNS]."""
    offset, width = bias_rows(store0, length, i0, SQUARE)
    rows = i0 % BIAS_ROWS + tl.arange(0, ROWS)
    return tl.load(Bias + offset + rows[:, None] * width + (j0 + tl.arange(0, COLUMNS))[None, :])


@triton.jit
def score_index(
    store0, length, i0, j0, head, num_heads, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr
):
    """Where the score gradients of queries i0 on and keys j0 on are kept: like the bias, head after head in a block."""
    offset, width = bias_rows(store0, length, i0, SQUARE)
    # Inside a block 32 bits are enough.
    width = width.to(tl.int32)
    rows = i0 % BIAS_ROWS + tl.arange(0, ROWS)
    inside = rows[:, None] * width + (j0 + tl.arange(0, COLUMNS))[None, :]
    return offset * num_heads + head.to(tl.int64) * (BIAS_ROWS * width) + inside


@triton.jit
def identity(SIZE: tl.constexpr):
    """The unit matrix, to add a bias by a product (see `half_scores`)."""
    index = tl.arange(0, SIZE)
    return (index[:, None] == index[None, :]).to(tl.float16)


@triton.jit
def half_scores(
    q, k, eye, Bias, store0, length, i0, j0, half_alpha,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, SQUARE: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, KEYS_DOWN: tl.constexpr,
):  # fmt: skip
    """Half of alpha q k^T + bias; queries down and keys across, or the other way round. `Bias` holds bias / alpha.

    BIAS is "none", "sum" or "product": the unit matrix times the bias goes the way of the other operands, fetched
    tiles ahead into shared memory and added inside the tensor cores. A plain sum waits for its load and for shuffling
    it into their layout: 2.3 times the time of the whole kernel without bias, against 1.3 this way.
    """
    if KEYS_DOWN:
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=ACC)
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC)
    if BIAS != "none":
        bias = read_bias(Bias, store0, length, i0, j0, ROWS, COLUMNS, SQUARE)
        if BIAS == "product":
            if KEYS_DOWN:
                s = tl.dot(tl.trans(bias), eye, s)
            else:
                s = tl.dot(bias, eye, s)
        else:
            if KEYS_DOWN:
                s += tl.trans(bias).to(ACC)
            else:
                s += bias.to(ACC)
    return s * half_alpha


@triton.constexpr_function
def counts_seers(visibility):
    """Whether the tokens that see a key are counted."""
    return visibility in ("counts", "counts of targets")


@triton.constexpr_function
def of_targets(visibility):
    """Whether targets alone see anything."""
    return visibility.endswith(" of targets")


@triton.jit
def visible(
    i0, j0, Visibility, start, length, history, window, prefix,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LISTED: tl.constexpr, VISIBILITY: tl.constexpr,
    KEYS_DOWN: tl.constexpr,
):  # fmt: skip
    """Where queries i0 on see keys j0 on, queries down or keys down; the same words as `AttentionMask`.

    Queries beyond the sequence may see something: most callers drop what they get.

    VISIBILITY says what `Visibility` holds (see `plan.visibility.KeyVisibility`). Counts leave a difference and a
    comparison to each pair:
    a thread of a tile of 64 queries and keys has 32 pairs of 16 keys, so that work on keys costs half as much. They
    are read beyond the sequence, too, where no query of it lies behind the key.
    """
    down: tl.constexpr = BLOCK_N if KEYS_DOWN else BLOCK_M
    across: tl.constexpr = BLOCK_M if KEYS_DOWN else BLOCK_N
    if KEYS_DOWN:
        key = tl.arange(0, down)[:, None]
        i = i0 + tl.arange(0, across)[None, :]
    else:
        key = tl.arange(0, across)[None, :]
        i = i0 + tl.arange(0, down)[:, None]
    j = j0 + key
    if LISTED:
        if counts_seers(VISIBILITY):
            count = tl.load(Visibility + (start + j0) + key).to(tl.uint32)
            # Without a sign: what lies ahead of the key is far behind it.
            seen = (i - j).to(tl.uint32) < count
        else:
            seen = (j <= i) & ((tl.minimum(i, history) - j <= window) | (j < prefix))
            if VISIBILITY == "codes" or VISIBILITY == "codes of targets":
                own = tl.load(Visibility + start + i, mask=i < length, other=0)
                other = tl.load(Visibility + start + j, mask=j < length, other=0)
                seen = seen & (((own >> 1) == (other >> 1)) | ((other & 1) == 1))
            seen = ((seen & (j < history)) | (i == j)) & (i < length)
        if prefix > 0:
            seen = seen | ((i < tl.minimum(prefix, history)) & (j < history))
        if of_targets(VISIBILITY):
            seen = seen & (i >= history)
        return seen
    else:
        return j <= i


@triton.constexpr_function
def masked_stages(stages, listed):
    """Tiles in flight where some scores are hidden: under a mask nearly half of all pairs, else one or two."""
    return stages if listed else 1


@triton.jit
def pair_number(Pairs, n, LISTED: tl.constexpr):
    if LISTED:
        return tl.load(Pairs + n)
    else:
        return n


@triton.jit
def weights_and_slope(
    h, dp, log_sum, delta, seen,
    SOFTMAX: tl.constexpr, FAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attention weights and the gradient of the scores, both without their constant factors."""
    if SOFTMAX:
        p = tl.exp2(h * (2 * LOG2_E) - log_sum)
        if MASKED:
            p = tl.where(seen, p, 0.0)
        return p, p * (dp - delta)
    else:
        if MASKED:
            # Before they are used, not after: fewer bits to remember in between.
            h = tl.where(seen, h, 0.0)
            dp = tl.where(seen, dp, 0.0)
        t = tanh(h, FAST)
        u = 1 + t
        return h * u, dp * (u + h * (1 - t * t))


@triton.jit
def read_row_sums(X, start, rows, head, num_heads, length, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        return tl.load(X + (start + rows) * num_heads + head, mask=rows < length, other=0.0)
    else:
        return rows
