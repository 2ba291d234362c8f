"""Triton kernels of the sampled softmax: losses of a tile of tokens, and the gradients of states and item vectors.

With s a state, r an item vector, hats for unit length and beta = 1 / temperature, the logits are beta s^ r^. Nothing of
unit length is ever stored: dot products of the plain vectors are multiplied by 1/|s| and 1/|r| afterwards. Logits are
kept for the backward, one number a token and negative, which is far less than a state.

Argument names as in `attention.triton.tiles`. Tiles holds (sequence, first token, number of tokens) of each tile.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

SHORTEST = tl.constexpr(1e-6)  # vectors are never divided by less; as in `reference.unit`


@triton.jit
def _tile(Tiles, BLOCK_T: tl.constexpr):
    at = Tiles + tl.program_id(0) * 3
    sequence, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    index = tl.arange(0, BLOCK_T)
    return sequence, first + index, index < count


@triton.jit
def _part(X, rows, real, d, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Columns d to d + BLOCK_D of some rows of X, which lie dense; zeros where there is nothing."""
    columns = d + tl.arange(0, BLOCK_D)
    at = X + rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
    return tl.load(at, mask=real[:, None] & (columns[None, :] < WIDTH), other=0.0)


@triton.jit
def _shares(Logits, tokens, real, n, log_sum, NEGATIVES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Logits n to n + BLOCK_N of some tokens and their softmax; what may not count has share and logit 0."""
    index = n + tl.arange(0, BLOCK_N)
    inside = real[:, None] & (index[None, :] < NEGATIVES)
    logits = tl.load(
        Logits + tokens[:, None].to(tl.int64) * NEGATIVES + index[None, :], mask=inside, other=-float("inf")
    )
    shares = tl.exp(logits - log_sum[:, None])
    return tl.where(logits == -float("inf"), 0.0, logits), shares


@triton.jit
def _weights(
    Logits, Negatives, RowScale, sequence, tokens, real, n, log_sum,
    NEGATIVES: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Negatives n to n + BLOCK_N of a sequence, and what the state of each token gets of their vectors."""
    index = n + tl.arange(0, BLOCK_N)
    there = index < NEGATIVES
    slots = tl.load(Negatives + sequence * NEGATIVES + index, mask=there, other=0)
    _, shares = _shares(Logits, tokens, real, n, log_sum, NEGATIVES, BLOCK_N)
    if UNIT:
        shares *= tl.load(RowScale + slots, mask=there, other=0.0)[None, :]
    return slots, there, shares.to(DOT)


@triton.jit(do_not_specialize=["num_rows"])
def row_scale_kernel(X, Scale, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """1 / length of every row."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x = _part(X, rows, rows < num_rows, 0, WIDTH, BLOCK).to(Scale.dtype.element_ty)
    tl.store(Scale + rows, 1 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), SHORTEST), mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def row_gradient_kernel(
    X, Scale, DUnit, DX, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Gradient of a row from that of the row at unit length: what points along the row falls away."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = rows < num_rows
    scale = tl.load(Scale + rows, mask=real, other=0.0)
    x = _part(X, rows, real, 0, WIDTH, BLOCK).to(Scale.dtype.element_ty)
    grad = _part(DUnit, rows, real, 0, WIDTH, BLOCK).to(Scale.dtype.element_ty)
    along = tl.where(scale < 1 / SHORTEST, tl.sum(grad * x, 1) * scale * scale, 0.0)
    columns = tl.arange(0, BLOCK)
    out = (grad - x * along[:, None]) * scale[:, None]
    inside = real[:, None] & (columns[None, :] < WIDTH)
    tl.store(DX + rows[:, None] * WIDTH + columns[None, :], out.to(DX.dtype.element_ty), mask=inside)


@triton.jit
def loss_kernel(
    States, Rows, RowScale, Targets, Negatives, Tiles, Losses, Logits, Totals, StateScale, Positives,
    beta, NEGATIVES: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Loss of every token of a tile; keeps logits, their log-sum, and 1 / length of the states."""
    ACC: tl.constexpr = Losses.dtype.element_ty
    sequence, tokens, real = _tile(Tiles, BLOCK_T)
    targets = tl.load(Targets + tokens, mask=real, other=0)
    positive = tl.zeros([BLOCK_T], ACC)
    squares = tl.zeros([BLOCK_T], ACC)
    for d in range(0, WIDTH, BLOCK_D):
        states = _part(States, tokens, real, d, WIDTH, BLOCK_D).to(ACC)
        positive += tl.sum(states * _part(Rows, targets, real, d, WIDTH, BLOCK_D).to(ACC), 1)
        squares += tl.sum(states * states, 1)
    positive *= beta
    scale = beta + tl.zeros([BLOCK_T], ACC)
    if UNIT:
        state_scale = 1 / tl.maximum(tl.sqrt(squares), SHORTEST)
        tl.store(StateScale + tokens, state_scale, mask=real)
        scale *= state_scale
        positive *= state_scale * tl.load(RowScale + targets, mask=real, other=0.0)
    top = positive
    total = tl.full([BLOCK_T], 1.0, ACC)
    for n in range(0, NEGATIVES, BLOCK_N):
        index = n + tl.arange(0, BLOCK_N)
        there = index < NEGATIVES
        slots = tl.load(Negatives + sequence * NEGATIVES + index, mask=there, other=-1)
        logits = tl.zeros([BLOCK_T, BLOCK_N], ACC)
        for d in range(0, WIDTH, BLOCK_D):
            states = _part(States, tokens, real, d, WIDTH, BLOCK_D).to(DOT)
            rows = _part(Rows, slots, there, d, WIDTH, BLOCK_D).to(DOT)
            logits = tl.dot(states, tl.trans(rows), logits, input_precision=PRECISION, out_dtype=ACC)
        logits *= scale[:, None]
        if UNIT:
            logits *= tl.load(RowScale + slots, mask=there, other=0.0)[None, :]
        # A negative that is the token's own target does not count.
        logits = tl.where(there[None, :] & (slots[None, :] != targets[:, None]), logits, -float("inf"))
        inside = real[:, None] & there[None, :]
        tl.store(Logits + tokens[:, None].to(tl.int64) * NEGATIVES + index[None, :], logits, mask=inside)
        higher = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(logits - higher[:, None]), 1)
        top = higher
    log_sum = top + tl.log(total)
    tl.store(Losses + tokens, log_sum - positive, mask=real)
    tl.store(Totals + tokens, log_sum, mask=real)
    tl.store(Positives + tokens, positive, mask=real)


@triton.jit
def state_gradient_kernel(
    States, Rows, RowScale, Targets, Negatives, Tiles, Logits, Totals, StateScale, Positives, DLoss, DStates, DUnits,
    beta, NEGATIVES: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the states of a tile, and what each gives to its target's vector at unit length."""
    ACC: tl.constexpr = Totals.dtype.element_ty
    sequence, tokens, real = _tile(Tiles, BLOCK_T)
    targets = tl.load(Targets + tokens, mask=real, other=0)
    log_sum = tl.load(Totals + tokens, mask=real, other=0.0)
    positive = tl.load(Positives + tokens, mask=real, other=0.0)
    own = tl.exp(positive - log_sum) - 1
    along = own * positive
    for n in range(0, NEGATIVES, BLOCK_N):
        logits, shares = _shares(Logits, tokens, real, n, log_sum, NEGATIVES, BLOCK_N)
        along += tl.sum(shares * logits, 1)
    grad = tl.load(DLoss).to(ACC)
    scale = grad * beta + tl.zeros([BLOCK_T], ACC)
    target_scale = tl.full([BLOCK_T], 1.0, ACC)
    if UNIT:
        state_scale = tl.load(StateScale + tokens, mask=real, other=0.0)
        scale *= state_scale
        target_scale = tl.load(RowScale + targets, mask=real, other=0.0)
        along = tl.where(state_scale < 1 / SHORTEST, along * grad * state_scale * state_scale, 0.0)
    # Where one block holds all negatives, their weights are the same for all columns.
    ONCE: tl.constexpr = NEGATIVES <= BLOCK_N
    if ONCE:
        slots, there, weights = _weights(
            Logits, Negatives, RowScale, sequence, tokens, real, 0, log_sum, NEGATIVES, BLOCK_N, UNIT, DOT
        )
    for d in range(0, WIDTH, BLOCK_D):
        out = tl.zeros([BLOCK_T, BLOCK_D], ACC)
        for n in range(0, NEGATIVES, BLOCK_N):
            if not ONCE:
                slots, there, weights = _weights(
                    Logits,
                    Negatives,
                    RowScale,
                    sequence,
                    tokens,
                    real,
                    n,
                    log_sum,
                    NEGATIVES,
                    BLOCK_N,
                    UNIT,
                    DOT,
                )
            rows = _part(Rows, slots, there, d, WIDTH, BLOCK_D).to(DOT)
            out = tl.dot(weights, rows, out, input_precision=PRECISION, out_dtype=ACC)
        states = _part(States, tokens, real, d, WIDTH, BLOCK_D).to(ACC)
        out += (own * target_scale)[:, None] * _part(Rows, targets, real, d, WIDTH, BLOCK_D).to(ACC)
        out *= scale[:, None]
        if UNIT:
            out -= along[:, None] * states
        columns = d + tl.arange(0, BLOCK_D)
        at = tokens[:, None].to(tl.int64) * WIDTH + columns[None, :]
        inside = real[:, None] & (columns[None, :] < WIDTH)
        tl.store(DStates + at, out.to(DStates.dtype.element_ty), mask=inside)
        tl.store(DUnits + at, ((own * scale)[:, None] * states).to(DUnits.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def negative_gradient_kernel(
    States, Sequences, Offsets, Logits, Totals, StateScale, DLoss, DUnits,
    num_tokens, beta, NEGATIVES: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a sequence gives to some of its negatives, some columns of it; these stand behind the targets' in DUnits.

    All programs of the longest sequence come first: it takes longest, and they read the same logits.
    """
    ACC: tl.constexpr = Totals.dtype.element_ty
    COLUMNS: tl.constexpr = (WIDTH + BLOCK_D - 1) // BLOCK_D
    BLOCKS: tl.constexpr = (NEGATIVES + BLOCK_N - 1) // BLOCK_N
    number = tl.program_id(0)
    d = number % COLUMNS * BLOCK_D
    n = number // COLUMNS % BLOCKS * BLOCK_N
    sequence = tl.load(Sequences + number // (COLUMNS * BLOCKS))
    first = tl.load(Offsets + sequence)
    end = tl.load(Offsets + sequence + 1)
    out = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    for start in range(first, end, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        real = tokens < end
        log_sum = tl.load(Totals + tokens, mask=real, other=0.0)
        _, shares = _shares(Logits, tokens, real, n, log_sum, NEGATIVES, BLOCK_N)
        if UNIT:
            shares *= tl.load(StateScale + tokens, mask=real, other=0.0)[:, None]
        states = _part(States, tokens, real, d, WIDTH, BLOCK_D).to(DOT)
        out = tl.dot(tl.trans(shares.to(DOT)), states, out, input_precision=PRECISION, out_dtype=ACC)
    out *= tl.load(DLoss).to(ACC) * beta
    index = n + tl.arange(0, BLOCK_N)
    columns = d + tl.arange(0, BLOCK_D)
    rows = num_tokens + sequence.to(tl.int64) * NEGATIVES + index
    inside = (index[:, None] < NEGATIVES) & (columns[None, :] < WIDTH)
    tl.store(DUnits + rows[:, None] * WIDTH + columns[None, :], out.to(DUnits.dtype.element_ty), mask=inside)
