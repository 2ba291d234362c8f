"""Launch: turns tensors, masks and tile sizes into the arguments of a Triton kernel, by their names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from freescale.kernels.attention.mask import NO_WINDOW, AttentionMask
from freescale.kernels.attention.pads import token_room
from freescale.kernels.attention.plan.schedule import AttentionSchedule, Part, Side, has_targets, is_square
from freescale.kernels.attention.plan.visibility import KeyVisibility
from freescale.kernels.runtime import CachedLauncher, product_precision


class Tile(NamedTuple):
    """Queries and keys a step, warps, tiles in flight, and whether they are fetched through tensor descriptors."""

    queries: int
    keys: int
    warps: int
    stages: int
    descriptors: bool = False


class Launch:
    """One attention call: its inputs, and how kernels are started on them.

    Args:
        q: [T, heads, width], last dimension dense; k and v likewise.
        k: keys; they and the values may have fewer heads, each shared by `group` neighbouring heads of q.
        v: values.
        work: the batch's lists of tiles.
        mask: what tokens see, if not simply everything before them.
        alpha: factor of the scores.
        softmax: softmax instead of SiLU.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        work: AttentionSchedule,
        mask: AttentionMask | None,
        *,
        alpha: float,
        softmax: bool,
    ) -> None:
        self.work, self.mask = work, mask
        self.q, self.k, self.v = q, k, v
        self.alpha, self.softmax = alpha, softmax
        self.num_heads = q.shape[1]
        self.group = self.num_heads // k.shape[1]
        self.nothing = work.nothing
        self.precision = product_precision(q.dtype)
        self.sums_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self._visibility = KeyVisibility("none", work.nothing) if mask is None else work.visibility(mask)
        # All that a kernel is compiled for, besides its tile, its options and the strides of its tensors. Not the mask
        # itself: it would be kept for good.
        seen = None if mask is None else (mask.window, mask.prefix, has_targets(mask), self._visibility.kind)
        widths = (self.num_heads, self.group, q.shape[2], v.shape[2])
        self._facts = (*widths, q.dtype, q.is_cuda, self.precision, softmax, seen)

    def room_for(self, x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Where kernels write the values of all tokens; pads are 0."""
        return token_room(x, *shape, work=self.work, dtype=dtype)

    def row_sums(self) -> Tensor:
        """One number a token and head, where softmax needs it."""
        if not self.softmax:
            return self.nothing
        return self.q.new_empty(self.q.shape[:2], dtype=self.sums_dtype)

    def tiles(
        self,
        kernel: Any,
        side: Side,
        tile: Tile,
        *,
        part: Part | None = None,
        more: dict[str, Tensor],
        **shared: Any,
    ) -> None:
        """Start one program for each tile of `side` and head, of all sequences or of a part; the rest as in `start`."""
        block, other = (tile.queries, tile.keys) if side == "queries" else (tile.keys, tile.queries)
        plan = self.work.tiles(side, block=block, other=other, mask=self.mask, part=part)
        more = {**more, "Tiles": plan.tiles, "Pairs": plan.pairs}
        self.start(kernel, plan.tiles.shape[0] * self.num_heads, tile, more=more, **shared)

    def start(
        self,
        kernel: Any,
        num_programs: int,
        tile: Tile,
        *,
        read: dict[str, Tensor],
        write: dict[str, Tensor],
        more: dict[str, Tensor],
        numbers: dict[str, float],
        options: dict[str, Any],
    ) -> None:
        """Start a kernel.

        Args:
            kernel: one of `attention_kernels`, `kept_scores` or `bias_gradient_kernels`.
            num_programs: how many.
            tile: its tile size.
            read: tensors [T, heads, width] fetched tile by tile.
            write: tensors [T, heads, width] to fill.
            more: other tensors.
            numbers: factors; those it has no argument for are left out.
            options: what else it is compiled for.
        """
        reads, writes = tuple(read.values()), tuple(write.values())
        described = tile.descriptors and _can_describe(reads)
        strides = [x.stride() for x in reads + writes]
        names = (*read, *write, *more, *numbers, *options)
        key = (id(kernel), *names, *options.values(), *strides, tile, described, *self._facts)
        prepared = _prepared.get(key)
        if prepared is None:
            constants = self._constants(kernel, tile, {**read, **write}, {**options, "TMA": described})
            prepared = _prepared[key] = CachedLauncher(
                kernel,
                (*read, *write, *more, "Visibility"),
                (*numbers, "half_alpha"),
                constants,
                described=len(read) if described else 0,
            )
        if described:
            reads = tuple(_described(x, _rows(name, tile)) for name, x in read.items())
        tensors = (*reads, *writes, *more.values(), self._visibility.tokens)
        # Floats always: Triton would build a whole number 1 into the kernel, which then serves other factors, too.
        factors = (*map(float, numbers.values()), self.alpha / 2)
        prepared.start((num_programs,), tensors, factors)

    def _constants(
        self, kernel: Any, tile: Tile, strided: dict[str, Tensor], options: dict[str, Any]
    ) -> dict[str, Any]:
        """All that a kernel is compiled for, of what it has arguments for."""
        q, v, mask = self.q, self.v, self.mask
        found = {
            **options,
            **{f"{_short(name)}_row": x.stride(0) for name, x in strided.items()},
            **{f"{_short(name)}_head": x.stride(1) for name, x in strided.items()},
            "num_heads": self.num_heads,
            "window": NO_WINDOW if mask is None or mask.window is None else mask.window,
            "prefix": 0 if mask is None else mask.prefix,
            "WIDTH": q.shape[2],
            "V_WIDTH": v.shape[2],
            "BLOCK_D": padded(q.shape[2]),
            "BLOCK_V": padded(v.shape[2]),
            "BLOCK_M": tile.queries,
            "BLOCK_N": tile.keys,
            "STAGES": tile.stages,
            "SOFTMAX": self.softmax,
            "GROUP": self.group,
            "SQUARE": is_square(mask),
            "TARGETS": has_targets(mask),
            "LISTED": mask is not None,
            "VISIBILITY": self._visibility.kind,
            "FAST": q.dtype.itemsize == 2 and q.is_cuda,
            "PRECISION": self.precision,
            "ACC": q.dtype if q.dtype == torch.float64 else torch.float32,
        }
        known = kernel.arg_names
        return {**{name: x for name, x in found.items() if name in known}, "num_warps": tile.warps}


_prepared: dict[tuple[Any, ...], CachedLauncher] = {}


def _short(name: str) -> str:
    return "o" if name == "Out" else name.lower()


def last_dense(x: Tensor) -> Tensor:
    """The same values with neighbouring numbers of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def padded(width: int) -> int:
    """The width of a tile that holds heads of this width."""
    return max(16, 1 << (width - 1).bit_length())


def _can_describe(tensors: tuple[Tensor, ...]) -> bool:
    """Descriptors want 16-byte steps, heads side by side, and a width that is a whole tile; and a GPU."""
    for x in tensors:
        width = x.shape[-1]
        row, head, _ = x.stride()
        aligned = x.data_ptr() % 16 == 0 and row * x.element_size() % 16 == 0
        if not (x.is_cuda and aligned and head == width and width == padded(width)):
            return False
    return True


def _rows(name: str, tile: Tile) -> int:
    """How many rows of a tensor are fetched at a time."""
    return tile.queries if name in ("Q", "DO") else tile.keys


def _described(x: Tensor, rows: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    tokens, heads, width = x.shape
    return TensorDescriptor(x, [tokens, heads * width], [x.stride(0), 1], [rows, width])
