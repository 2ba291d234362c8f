"""Launch: turns tensors, masks and tile sizes into the arguments of a Triton kernel, by their names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from freescale.kernels.attention_mask import NO_WINDOW, AttentionMask
from freescale.kernels.attention_work import AttentionWork, Side, is_square


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
        k: keys.
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
        work: AttentionWork,
        mask: AttentionMask | None,
        *,
        alpha: float,
        softmax: bool,
    ) -> None:
        self.work, self.mask = work, mask
        self.q, self.k, self.v = q, k, v
        self.alpha, self.softmax = alpha, softmax
        self.nothing = q.new_empty(1)
        self.interpreted = q.device.type != "cuda"
        self.sums_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

    def row_sums(self) -> Tensor:
        """One number a token and head, where softmax needs it."""
        if not self.softmax:
            return self.nothing
        return self.q.new_empty(self.q.shape[:2], dtype=self.sums_dtype)

    def tiles(self, kernel: Any, side: Side, tile: Tile, *, read: dict[str, Tensor], **more: Any) -> None:
        """Start one program for each tile of `side` and head; `read` are the tensors fetched tile by tile."""
        block, other = (tile.queries, tile.keys) if side == "queries" else (tile.keys, tile.queries)
        plan = self.work.tiles(side, block=block, other=other, mask=self.mask)
        descriptors = tile.descriptors and all(map(_can_describe, read.values())) and not self.interpreted
        tall = {"Q": tile.queries, "DO": tile.queries, "K": tile.keys, "V": tile.keys}
        self.start(
            kernel,
            (len(plan.tiles) * self.q.shape[1],),
            {name: _described(x, tall[name]) if descriptors else x for name, x in read.items()},
            strides=read,
            Tiles=plan.tiles,
            Pairs=plan.pairs,
            BLOCK_M=tile.queries,
            BLOCK_N=tile.keys,
            STAGES=tile.stages,
            TMA=descriptors,
            SOFTMAX=self.softmax,
            num_warps=tile.warps,
            **more,
        )

    def start(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: dict[str, Any],
        *,
        strides: dict[str, Tensor],
        write: dict[str, Tensor] | None = None,
        **more: Any,
    ) -> None:
        """Start a kernel with what all of them need, and `more`."""
        from triton import language as tl

        mask = self.mask
        codes = None if mask is None else self.work.codes(mask)
        for name, x in (strides | (write or {})).items():
            short = "o" if name == "Out" else name.lower()
            more[f"{short}_row"], more[f"{short}_head"] = x.stride(0), x.stride(1)
        width, v_width = self.q.shape[-1], self.v.shape[-1]
        start_kernel(
            kernel,
            grid,
            {
                **tensors,
                **(write or {}),
                **more,
                "Codes": self.nothing if codes is None else codes,
                "num_heads": self.q.shape[1],
                "half_alpha": self.alpha / 2,
                "window": NO_WINDOW if mask is None or mask.window is None else mask.window,
                "prefix": 0 if mask is None else mask.prefix,
                "WIDTH": width,
                "V_WIDTH": v_width,
                "BLOCK_D": _padded(width),
                "BLOCK_V": _padded(v_width),
                "SQUARE": is_square(mask),
                "LISTED": mask is not None,
                "SEGMENTS": codes is not None,
                "FAST": self.q.dtype.itemsize == 2 and not self.interpreted,
                "PRECISION": _precision(self.q.dtype),
                "ACC": tl.float64 if self.sums_dtype == torch.float64 else tl.float32,
            },
        )


_compiled: dict[tuple[Any, ...], Any] = {}


def start_kernel(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """kernel[grid](**arguments), remembering the compiled kernel.

    Triton looks at every argument to find the compiled kernel, 0.3 ms for the forty of an attention kernel: longer
    than the kernel itself runs. What decides is the same here, but cheap: constants by value, numbers by divisibility.
    """
    num_warps = arguments.pop("num_warps")
    if not hasattr(kernel, "params"):  # interpreted
        kernel[grid](**arguments, num_warps=num_warps)
        return
    values = [arguments[param.name] for param in kernel.params]
    kinds = [x if param.is_constexpr else _kind(x) for param, x in zip(kernel.params, values)]
    key = (kernel, num_warps, torch.cuda.current_device(), *kinds)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](**arguments, num_warps=num_warps)
    else:
        compiled[(*grid, 1, 1)[:3]](*values)


def _kind(x: Any) -> Any:
    """What of an argument Triton compiles for."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int):
        return x == 1, x % 16 == 0, x < 2**31
    if isinstance(x, float):
        return float
    return x.base.dtype, *x.block_shape


def last_dense(x: Tensor) -> Tensor:
    """The same values with neighbouring numbers of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _precision(dtype: torch.dtype) -> str:
    """What `torch.set_float32_matmul_precision` asks for."""
    tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if tf32 else "ieee"


def _can_describe(x: Tensor) -> bool:
    """Descriptors want 16-byte steps, heads side by side, and a width that is a whole tile."""
    width = x.shape[-1]
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return aligned and x.stride(1) == width and width == _padded(width)


def _described(x: Tensor, rows: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    tokens, heads, width = x.shape
    return TensorDescriptor(x, [tokens, heads * width], [x.stride(0), 1], [rows, width])
