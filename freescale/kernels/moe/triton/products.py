"""Triton kernels for the products of expert MLPs: rows times their expert's matrix, and products over an expert's rows.

Rows of tokens are read where they stand, through `Tokens`; the other operands lie side by side and come by tensor
descriptors where they can. A tile of 128 rows belongs to one expert (see `moe_routing.tile_list`). The activation runs
on the sums while they are still in registers, and so does its backward. Nothing is added across programs.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from freescale.kernels.moe.triton.rows import activated, through_activation


@triton.jit
def grouped_order(program, num_row_tiles, num_column_tiles, GROUP: tl.constexpr):
    """Row and column tile of a program: GROUP row tiles meet all columns before the next ones, to share the cache."""
    per_group = GROUP * num_column_tiles
    group = program // per_group
    first = group * GROUP
    tall = tl.minimum(num_row_tiles - first, GROUP)
    within = program - group * per_group
    return first + within % tall, within // tall


@triton.jit
def read_rows(Source, at, k0, width, INNER: tl.constexpr, WHOLE: tl.constexpr):
    """[rows, INNER] of rows that start at `at`, columns from k0 on; zeros beyond `width`."""
    inner = k0 + tl.arange(0, INNER)
    if WHOLE:
        rows = tl.load(Source + at[:, None] + inner[None, :])
    else:
        rows = tl.load(Source + at[:, None] + inner[None, :], mask=inner[None, :] < width, other=0.0)
    return rows


@triton.jit
def read_weight(
    W, expert, n0, k0, num_columns, num_inner,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, TURNED: tl.constexpr, WHOLE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[INNER, COLUMNS] of an expert's matrix, kept as [columns, inner] (TURNED) or as [inner, columns]."""
    if TMA and TURNED:
        w = W.load([expert * num_columns + n0, k0]).T
    elif TMA:
        w = W.load([expert * num_inner + k0, n0])
    else:
        columns, inner = n0 + tl.arange(0, COLUMNS), k0 + tl.arange(0, INNER)
        at = W + expert.to(tl.int64) * num_columns * num_inner
        if TURNED:
            at += columns[None, :].to(tl.int64) * num_inner + inner[:, None]
        else:
            at += inner[:, None].to(tl.int64) * num_columns + columns[None, :]
        if WHOLE:
            w = tl.load(at)
        else:
            w = tl.load(at, mask=(columns[None, :] < num_columns) & (inner[:, None] < num_inner), other=0.0)
    return w


@triton.jit
def result_places(
    first, stop, n0, Out, Hidden,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_IN_ALL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Which numbers of a tile are the expert's, and where they stand in Out and, for the gate, in Hidden."""
    own, columns = tl.arange(0, ROWS), n0 + tl.arange(0, COLUMNS)
    inside = (first + own[:, None] < stop) & (columns[None, :] < COLUMNS_IN_ALL)
    # 64 bits for the tile's start only: they take registers that the sums need.
    out = Out + first.to(tl.int64) * COLUMNS_IN_ALL + (own[:, None] * COLUMNS_IN_ALL + columns[None, :])
    WIDE: tl.constexpr = COLUMNS_IN_ALL * PARTS
    hidden = Hidden + first.to(tl.int64) * WIDE + (own[:, None] * WIDE + columns[None, :])
    return inside, out, hidden


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def through_end(
    d_activated, weight, first, stop, n0, Out, Hidden,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_IN_ALL: tl.constexpr,
    ACTIVATION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write gradients over Hidden and weight * activated to Out; what these columns give to the weights' gradients."""
    inside, out, hidden = result_places(first, stop, n0, Out, Hidden, ROWS, COLUMNS, COLUMNS_IN_ALL, PARTS)
    kind = Out.dtype.element_ty
    gate = tl.load(hidden, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if PARTS == 2:
        up = tl.load(hidden + COLUMNS_IN_ALL, mask=inside, other=0.0).to(tl.float32)
    after, d_gate, d_up = through_activation(gate, up, d_activated * weight[:, None], ACTIVATION)
    tl.store(hidden, d_gate.to(kind), mask=inside)
    if PARTS == 2:
        tl.store(hidden + COLUMNS_IN_ALL, d_up.to(kind), mask=inside)
    tl.store(out, (after * weight[:, None]).to(kind), mask=inside)
    return tl.sum(tl.where(inside, after * d_activated, 0.0), 1)


@triton.jit(do_not_specialize=["num_row_tiles", "num_weight_parts"])
def rows_kernel(
    Source, Tokens, W, Tiles, Out, Hidden, Weights, DWeights,
    num_row_tiles, num_weight_parts,
    COLUMNS_IN_ALL: tl.constexpr, INNER_IN_ALL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    GATHER: tl.constexpr, TURNED: tl.constexpr, TMA: tl.constexpr, TMA_ROWS: tl.constexpr,
    END: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of rows times columns of its expert's matrix; what then happens to the sums says END.

    "store": they are Out. "forward": they are Hidden, the activation of them Out; SwiGLU computes gate and up at once.
    "backward": they are the gradient of the activation: gradients over Hidden, weight * activated to Out, and the part
    of these columns of each row's DWeights.
    """
    num_column_tiles = tl.cdiv(COLUMNS_IN_ALL, COLUMNS)
    tile, column_tile = grouped_order(tl.program_id(0), num_row_tiles, num_column_tiles, GROUP)
    expert = tl.load(Tiles + tile * 3)
    if expert >= 0:
        first = tl.load(Tiles + tile * 3 + 1)
        stop = tl.load(Tiles + tile * 3 + 2)
        n0 = column_tile * COLUMNS
        # Rows beyond the expert's read its last one; they are not written.
        rows = tl.minimum(first + tl.arange(0, ROWS), stop - 1).to(tl.int64)
        at = rows * INNER_IN_ALL
        if GATHER:
            at = tl.load(Tokens + rows).to(tl.int64) * INNER_IN_ALL
        WHOLE: tl.constexpr = (INNER_IN_ALL % INNER == 0) and (COLUMNS_IN_ALL % COLUMNS == 0)
        WHOLE_ROWS: tl.constexpr = INNER_IN_ALL % INNER == 0
        TWO: tl.constexpr = (END == "forward") and (PARTS == 2)
        # With gate and up the expert's matrix has twice the columns, the up's behind all of the gate's.
        IN_MATRIX: tl.constexpr = COLUMNS_IN_ALL * 2 if TWO else COLUMNS_IN_ALL
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        sums_up = tl.zeros([ROWS, COLUMNS], tl.float32) if TWO else sums
        for k0 in tl.range(0, INNER_IN_ALL, INNER, num_stages=STAGES):
            if TMA_ROWS:
                source = Source.load([first, k0])
            else:
                source = read_rows(Source, at, k0, INNER_IN_ALL, INNER, WHOLE_ROWS)
            w = read_weight(
                W, expert, n0, k0, IN_MATRIX, INNER_IN_ALL, COLUMNS, INNER, TURNED, WHOLE, TMA
            )  # fmt: skip
            sums = tl.dot(source, w, sums, input_precision=PRECISION)
            if TWO:
                w_up = read_weight(
                    W, expert, n0 + COLUMNS_IN_ALL, k0, IN_MATRIX, INNER_IN_ALL, COLUMNS, INNER, TURNED, WHOLE, TMA
                )  # fmt: skip
                sums_up = tl.dot(source, w_up, sums_up, input_precision=PRECISION)
        if END == "store":
            inside, out, _ = result_places(first, stop, n0, Out, Hidden, ROWS, COLUMNS, COLUMNS_IN_ALL, PARTS)
            tl.store(out, sums.to(Out.dtype.element_ty), mask=inside)
        if END == "forward":
            inside, out, hidden = result_places(
                first, stop, n0, Out, Hidden, ROWS, COLUMNS, COLUMNS_IN_ALL, PARTS
            )
            # Rounded before the activation, as the backward will see them.
            gate, up = sums.to(Out.dtype.element_ty), sums_up.to(Out.dtype.element_ty)
            if KEEP:
                tl.store(hidden, gate, mask=inside)
                if TWO:
                    tl.store(hidden + COLUMNS_IN_ALL, up, mask=inside)
            after = activated(gate.to(tl.float32), up.to(tl.float32), ACTIVATION)
            tl.store(out, after.to(Out.dtype.element_ty), mask=inside)
        if END == "backward":
            # A quarter of the columns at a time: all at once need more registers than there are.
            QUARTER: tl.constexpr = COLUMNS // 4
            left, right = halves(sums, ROWS, COLUMNS)
            a, b = halves(left, ROWS, COLUMNS // 2)
            c, d = halves(right, ROWS, COLUMNS // 2)
            own = first + tl.arange(0, ROWS)
            weight = tl.load(Weights + own, mask=own < stop, other=0.0)
            part = through_end(
                a, weight, first, stop, n0, Out, Hidden, ROWS, QUARTER, COLUMNS_IN_ALL, ACTIVATION, PARTS
            )  # fmt: skip
            part += through_end(
                b, weight, first, stop, n0 + QUARTER, Out, Hidden, ROWS, QUARTER, COLUMNS_IN_ALL, ACTIVATION, PARTS
            )  # fmt: skip
            part += through_end(
                c, weight, first, stop, n0 + 2 * QUARTER, Out, Hidden, ROWS, QUARTER, COLUMNS_IN_ALL, ACTIVATION, PARTS
            )  # fmt: skip
            part += through_end(
                d, weight, first, stop, n0 + 3 * QUARTER, Out, Hidden, ROWS, QUARTER, COLUMNS_IN_ALL, ACTIVATION, PARTS
            )  # fmt: skip
            tl.store(DWeights + own.to(tl.int64) * num_weight_parts + column_tile, part, mask=own < stop)


@triton.jit
def read_block(
    Source, Tokens, r0, stop, c0, width,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, GATHER: tl.constexpr, TMA: tl.constexpr, WHOLE: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """[INNER, COLUMNS]: rows from r0 on, columns from c0 on; zeros from row `stop` and column `width` on."""
    rows = r0 + tl.arange(0, INNER)
    if TMA:
        block = Source.load([r0, c0])
        if not INSIDE:
            block = tl.where(rows[:, None] < stop, block, tl.zeros_like(block))
    else:
        columns = c0 + tl.arange(0, COLUMNS)
        if GATHER:
            row = tl.load(Tokens + rows) if INSIDE else tl.load(Tokens + rows, mask=rows < stop, other=0)
        else:
            row = rows
        at = Source + row[:, None].to(tl.int64) * width + columns[None, :]
        if INSIDE and WHOLE:
            block = tl.load(at)
        else:
            block = tl.load(at, mask=(rows[:, None] < stop) & (columns[None, :] < width), other=0.0)
    return block


@triton.jit(do_not_specialize=["num_row_tiles", "num_column_tiles"])
def weights_kernel(
    Left, Right, Tokens, Offsets, Out, num_row_tiles, num_column_tiles,
    LEFT_WIDTH: tl.constexpr, RIGHT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    GATHER_LEFT: tl.constexpr, TMA: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Out[e] = Left^T Right over the rows of expert e, one tile of it; either Left or Right is read through Tokens."""
    per_expert = num_row_tiles * num_column_tiles
    expert = tl.program_id(0) // per_expert
    row_tile, column_tile = grouped_order(
        tl.program_id(0) % per_expert, num_row_tiles, num_column_tiles, GROUP
    )  # fmt: skip
    start = tl.load(Offsets + expert)
    stop = tl.load(Offsets + expert + 1)
    # With ADD an expert without rows stays as it is; without, it gets zeros.
    if (stop > start) or (not ADD):
        m0, n0 = row_tile * ROWS, column_tile * COLUMNS
        TMA_LEFT: tl.constexpr = TMA and not GATHER_LEFT
        TMA_RIGHT: tl.constexpr = TMA and GATHER_LEFT
        WHOLE_LEFT: tl.constexpr = LEFT_WIDTH % ROWS == 0
        WHOLE_RIGHT: tl.constexpr = RIGHT_WIDTH % COLUMNS == 0
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        full = start + (stop - start) // INNER * INNER
        for r0 in tl.range(start, full, INNER, num_stages=STAGES):
            left = read_block(
                Left, Tokens, r0, stop, m0, LEFT_WIDTH, INNER, ROWS, GATHER_LEFT, TMA_LEFT, WHOLE_LEFT, True
            )  # fmt: skip
            right = read_block(
                Right, Tokens, r0, stop, n0, RIGHT_WIDTH, INNER, COLUMNS, not GATHER_LEFT, TMA_RIGHT,
                WHOLE_RIGHT, True,
            )  # fmt: skip
            sums = tl.dot(left.T, right, sums, input_precision=PRECISION)
        if full < stop:
            left = read_block(
                Left, Tokens, full, stop, m0, LEFT_WIDTH, INNER, ROWS, GATHER_LEFT, TMA_LEFT, WHOLE_LEFT, False
            )  # fmt: skip
            right = read_block(
                Right, Tokens, full, stop, n0, RIGHT_WIDTH, INNER, COLUMNS, not GATHER_LEFT, TMA_RIGHT,
                WHOLE_RIGHT, False,
            )  # fmt: skip
            sums = tl.dot(left.T, right, sums, input_precision=PRECISION)
        rows, columns = m0 + tl.arange(0, ROWS), n0 + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < LEFT_WIDTH) & (columns[None, :] < RIGHT_WIDTH)
        at = (expert.to(tl.int64) * LEFT_WIDTH + rows[:, None]) * RIGHT_WIDTH + columns[None, :]
        if ADD:
            sums += tl.load(Out + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(Out + at, sums.to(Out.dtype.element_ty), mask=inside)
