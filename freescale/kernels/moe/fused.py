"""The steps of an expert MLP by Triton products: tokens are read where they stand, the activation runs in registers.

No routed copy of x or of the gradient is ever made, and the hidden numbers are read and written once a pass, so the
backward needs three hidden-sized buffers and nothing besides. Steps named in `by_torch` run as in `grouped`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from freescale.kernels.moe.grouped import GroupedSteps
from freescale.kernels.moe.routing import TILE_ROWS, num_tiles
from freescale.kernels.moe.steps import Activation, Routed, Span
from freescale.kernels.runtime import has_triton, product_precision, start_kernel


class Tile(NamedTuple):
    """Columns of the result and numbers summed at once, warps, tiles in flight, row tiles that share the cache.

    `registers` limits those of a thread, so that two programs fit on a multiprocessor; 0 leaves it to the compiler.
    """

    columns: int
    inner: int
    warps: int
    stages: int
    group: int = 8
    registers: int = 0


class Tiles(NamedTuple):
    """Tile sizes of each product; all have 128 rows."""

    hidden: Tile
    rows: Tile
    d_hidden: Tile
    d_w_out: Tile
    d_w_in: Tile
    d_rows: Tile


# From the compiler's report for sm_90 and the bytes each end moves; the benchmark's --sweep is to confirm them.
# 128 x 256 sums are half of the registers of eight warps, the most work for each byte read. The backward's end moves
# 160 KB a tile, which takes as long as its product at small widths, so two programs share a multiprocessor and one
# computes while the other writes; likewise the first product at small widths. Reading through tokens inside the loop
# takes two stages a tile in flight, one for the tokens and one for the rows: five stages are three tiles.
_HALF = Tiles(
    hidden=Tile(128, 64, 8, 4),
    rows=Tile(256, 64, 8, 4),
    d_hidden=Tile(128, 64, 8, 3, registers=128),
    d_w_out=Tile(256, 64, 8, 5),
    d_w_in=Tile(256, 64, 8, 5),
    d_rows=Tile(256, 64, 8, 4),
)
_SINGLE = Tiles(*(Tile(64, 32, 8, 2) for _ in Tiles._fields))._replace(hidden=Tile(32, 32, 8, 2))
NARROW = 512


def tiles_for(activation: Activation, dtype: torch.dtype, width: int) -> Tiles:
    """The tile sizes for this type and width; without a gate the first product has room for twice the columns."""
    if dtype.itemsize > 2:
        return _SINGLE
    columns = 128 if activation == "swiglu" else 256
    if width <= NARROW:
        return _HALF._replace(hidden=Tile(columns // 2, 64, 8, 3))
    return _HALF._replace(hidden=Tile(columns, 64, 8, 4))


def why_not_fused(x: Tensor, w_in: Tensor, w_out: Tensor) -> str | None:
    """The reason why the Triton products cannot run these, if there is one."""
    if not has_triton():
        return "it needs the triton package"
    if x.dtype == torch.float64 or {x.dtype, w_in.dtype, w_out.dtype} != {x.dtype}:
        return f"it takes bfloat16, float16 or float32, one for all, not {x.dtype}, {w_in.dtype} and {w_out.dtype}"
    return None


class FusedSteps:
    """Products by Triton with everything around them inside.

    Args:
        activation: "swiglu", "silu" or "relu2".
        tiles: tile sizes, instead of those of the table.
        by_torch: names of steps that torch's grouped products do instead.
    """

    def __init__(
        self, activation: Activation, *, tiles: Tiles | None = None, by_torch: frozenset[str] = frozenset()
    ) -> None:
        self.activation = activation
        self.by_torch = by_torch
        self._tiles = tiles
        self._grouped = GroupedSteps(activation)
        self._shape = {"ACTIVATION": activation, "PARTS": 2 if activation == "swiglu" else 1}

    def gather(self, values: Tensor, tokens: Tensor) -> Tensor:
        """values[tokens]."""
        return self._grouped.gather(values, tokens)

    def combine(self, rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
        """Sum over a token's rows, in the order of its choices."""
        return self._grouped.combine(rows, places, weights)

    def hidden(self, x: Routed, w_in: Tensor, span: Span) -> Tensor:
        """Before the activation."""
        if "hidden" in self.by_torch:
            return self._grouped.hidden(x, w_in, span)
        out = x.values.new_empty(span.stop - span.start, w_in.shape[1])
        tile, parts = self._tile("hidden", x.values), 2 if self.activation == "swiglu" else 1
        self._rows(x, w_in, span, tile._replace(columns=parts * tile.columns), out, turned=True)
        return out

    def activated(self, x: Routed, w_in: Tensor, span: Span, *, keep: bool) -> tuple[Tensor | None, Tensor]:
        """Before and after the activation, in one kernel."""
        if "hidden" in self.by_torch:
            return self._grouped.activated(x, w_in, span, keep=keep)
        num_rows, parts = span.stop - span.start, 2 if self.activation == "swiglu" else 1
        out = x.values.new_empty(num_rows, w_in.shape[1] // parts)
        hidden = x.values.new_empty(num_rows, w_in.shape[1]) if keep else None
        tile, tensors = self._tile("hidden", x.values), {} if hidden is None else {"Hidden": hidden}
        self._rows(x, w_in, span, tile, out, turned=True, tensors=tensors, END="forward", KEEP=keep)
        return hidden, out

    def rows(self, activated: Tensor, w_out: Tensor, span: Span) -> Tensor:
        """The experts' outputs."""
        if "rows" in self.by_torch:
            return self._grouped.rows(activated, w_out, span)
        out = activated.new_empty(len(activated), w_out.shape[1])
        self._rows(activated, w_out, span, self._tile("rows", out), out, turned=True)
        return out

    def d_hidden(
        self, grad: Routed, w_out: Tensor, hidden: Tensor, weights_R: Tensor, span: Span
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Product and activation backward in one kernel; every tile of columns gives its part of d_weights."""
        if "d_hidden" in self.by_torch:
            return self._grouped.d_hidden(grad, w_out, hidden, weights_R, span)
        scaled, tile = hidden.new_empty(len(hidden), w_out.shape[2]), self._tile("d_hidden", grad.values)
        num_parts = -(-scaled.shape[1] // tile.columns)
        parts = torch.empty(len(hidden), num_parts, dtype=torch.float32, device=hidden.device)
        tensors = {"Hidden": hidden, "Weights": weights_R, "DWeights": parts}
        self._rows(
            grad, w_out, span, tile, scaled, turned=False, tensors=tensors, parts=num_parts, END="backward"
        )
        return hidden, scaled, parts.sum(1)

    def d_rows(self, d_hidden: Tensor, w_in: Tensor, span: Span) -> Tensor:
        """Gradients of the rows' inputs."""
        if "d_rows" in self.by_torch:
            return self._grouped.d_rows(d_hidden, w_in, span)
        out = d_hidden.new_empty(len(d_hidden), w_in.shape[2])
        self._rows(d_hidden, w_in, span, self._tile("d_rows", out), out, turned=False)
        return out

    def d_w_out(self, grad: Routed, scaled: Tensor, span: Span, into: Tensor | None) -> Tensor:
        """Products over an expert's rows."""
        if "d_w_out" in self.by_torch:
            return self._grouped.d_w_out(grad, scaled, span, into)
        return self._weights(grad, scaled, span, self._tile("d_w_out", grad.values), into)

    def d_w_in(self, d_hidden: Tensor, x: Routed, span: Span, into: Tensor | None) -> Tensor:
        """Products over an expert's rows."""
        if "d_w_in" in self.by_torch:
            return self._grouped.d_w_in(d_hidden, x, span, into)
        return self._weights(d_hidden, x, span, self._tile("d_w_in", x.values), into)

    def _tile(self, step: str, tokens: Tensor) -> Tile:
        """The tile of a step; `tokens` is any tensor with a token's width and type."""
        tile: Tile = getattr(self._tiles or tiles_for(self.activation, tokens.dtype, tokens.shape[-1]), step)
        return tile

    def _rows(
        self,
        source: Tensor | Routed,
        weight: Tensor,
        span: Span,
        tile: Tile,
        out: Tensor,
        *,
        turned: bool,
        tensors: dict[str, Tensor] | None = None,
        parts: int = 0,
        **options: Any,
    ) -> None:
        """Start `rows_kernel`; `turned` where the matrices stand as [columns, inner]."""
        from freescale.kernels.moe.triton.products import rows_kernel

        values, tokens = _where(source, span)
        gathered, inner = isinstance(source, Routed), values.shape[1]
        box = (tile.columns, tile.inner) if turned else (tile.inner, tile.columns)
        matrices = weight.flatten(0, 1)
        tma = _can_describe(matrices, box, out.shape[1] % tile.columns, inner % tile.inner)
        tma_rows = tma and not gathered and _can_describe(values, (TILE_ROWS, tile.inner))
        named = {"Source": values, "Tokens": tokens, "W": weight, "Tiles": span.tiles, "Out": out}
        named |= {"Hidden": out, "Weights": out, "DWeights": out, **(tensors or {})}
        descriptors = {}
        if tma:
            del named["W"]
            descriptors["W"] = _described(matrices, box)
        if tma_rows:
            del named["Source"]
            descriptors["Source"] = _described(values, (TILE_ROWS, tile.inner))
        row_tiles = num_tiles(span.stop - span.start, len(weight))
        constants = {
            "COLUMNS_IN_ALL": out.shape[1],
            "INNER_IN_ALL": inner,
            "GATHER": gathered,
            "TURNED": turned,
            "TMA": tma,
            "TMA_ROWS": tma_rows,
            **{"END": "store", "KEEP": False, **options},
            **self._shape,
        }
        start_kernel(
            rows_kernel,
            (row_tiles * -(-out.shape[1] // tile.columns),),
            named,
            {"num_row_tiles": row_tiles, "num_weight_parts": parts},
            {**constants, **_sizes(tile, values.dtype)},
            descriptors,
        )

    def _weights(
        self, left: Tensor | Routed, right: Tensor | Routed, span: Span, tile: Tile, into: Tensor | None
    ) -> Tensor:
        """Start `weights_kernel`: one of `left` and `right` is read through the tokens."""
        from freescale.kernels.moe.triton.products import weights_kernel

        gather_left = isinstance(left, Routed)
        (a, tokens), (b, other) = _where(left, span), _where(right, span)
        num_experts, shape = len(span.offsets) - 1, (a.shape[1], b.shape[1])
        out = a.new_empty(num_experts, *shape) if into is None else into
        straight, box = (b, (tile.inner, tile.columns)) if gather_left else (a, (tile.inner, TILE_ROWS))
        tma = _can_describe(straight, box)
        sides, descriptors = {"Left": a, "Right": b}, {}
        if tma:
            side = "Right" if gather_left else "Left"
            del sides[side]
            descriptors[side] = _described(straight, box)
        grid = (-(-shape[0] // TILE_ROWS), -(-shape[1] // tile.columns))
        start_kernel(
            weights_kernel,
            (num_experts * grid[0] * grid[1],),
            {**sides, "Tokens": tokens if gather_left else other, "Offsets": span.offsets, "Out": out},
            {"num_row_tiles": grid[0], "num_column_tiles": grid[1]},
            {
                "LEFT_WIDTH": shape[0],
                "RIGHT_WIDTH": shape[1],
                "GATHER_LEFT": gather_left,
                "TMA": tma,
                "ADD": into is not None,
                **_sizes(tile, a.dtype),
            },
            descriptors,
        )
        return out


def _where(source: Tensor | Routed, span: Span) -> tuple[Tensor, Tensor]:
    """Values and the tokens to read them by."""
    return (source.values, source.tokens) if isinstance(source, Routed) else (source, span.offsets)


def _sizes(tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    limit = {"maxnreg": tile.registers} if tile.registers else {}
    return {
        **limit,
        "ROWS": TILE_ROWS,
        "COLUMNS": tile.columns,
        "INNER": tile.inner,
        "STAGES": tile.stages,
        "GROUP": tile.group,
        "PRECISION": product_precision(dtype),
        "num_warps": tile.warps,
    }


def _can_describe(x: Tensor, box: tuple[int, int], *rests: int) -> bool:
    """Descriptors want a GPU, 16-byte steps, and blocks that end where the matrices do."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    fits = x.shape[0] >= box[0] and x.shape[1] >= box[1]
    return x.device.type == "cuda" and x.dtype.itemsize == 2 and aligned and fits and not any(rests)


def _described(x: Tensor, box: tuple[int, int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box))
