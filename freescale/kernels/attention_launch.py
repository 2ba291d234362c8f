"""Launch: turns tensors, masks and tile sizes into the arguments of a Triton kernel, by their names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from freescale.kernels.attention_mask import NO_WINDOW, AttentionMask
from freescale.kernels.attention_work import AttentionWork, Part, Side, is_square


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
        work: AttentionWork,
        mask: AttentionMask | None,
        *,
        alpha: float,
        softmax: bool,
    ) -> None:
        self.work, self.mask = work, mask
        self.q, self.k, self.v = q, k, v
        self.alpha, self.softmax = alpha, softmax
        self.group = q.shape[1] // k.shape[1]
        self.nothing = work.nothing
        self.interpreted = q.device.type != "cuda"
        self.precision = _precision(q.dtype)
        self.sums_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self._codes = None if mask is None else work.codes(mask)
        window = NO_WINDOW if mask is None or mask.window is None else mask.window
        # All that a kernel is compiled for, besides its own options.
        self._constants = {
            "num_heads": q.shape[1],
            "window": window,
            "prefix": 0 if mask is None else mask.prefix,
            "WIDTH": q.shape[2],
            "V_WIDTH": v.shape[2],
            "BLOCK_D": _padded(q.shape[2]),
            "BLOCK_V": _padded(v.shape[2]),
            "SQUARE": is_square(mask),
            "LISTED": mask is not None,
            "SEGMENTS": self._codes is not None,
            "FAST": q.dtype.itemsize == 2 and not self.interpreted,
            "PRECISION": self.precision,
            "ACC": q.dtype if q.dtype == torch.float64 else torch.float32,
        }

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
        options: dict[str, Any],
        **shared: Any,
    ) -> None:
        """Start one program for each tile of `side` and head, of all sequences or of a part; the rest as in `start`."""
        block, other = (tile.queries, tile.keys) if side == "queries" else (tile.keys, tile.queries)
        plan = self.work.tiles(side, block=block, other=other, mask=self.mask, part=part)
        self.start(
            kernel,
            len(plan.tiles) * self.q.shape[1],
            tile,
            more={**more, "Tiles": plan.tiles, "Pairs": plan.pairs},
            options={**options, "SOFTMAX": self.softmax, "GROUP": self.group},
            **shared,
        )

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
            kernel: one of `triton_attention` or `triton_bias_gradients`; it is given what it has arguments for.
            num_programs: how many.
            tile: its tile size.
            read: tensors [T, heads, width] fetched tile by tile.
            write: tensors [T, heads, width] to fill.
            more: other tensors.
            numbers: factors.
            options: what else the kernel is compiled for.
        """
        strided = {**read, **write}
        descriptors = tile.descriptors and not self.interpreted and all(map(_can_describe, read.values()))
        tensors = {**strided, **more, "Codes": self.nothing if self._codes is None else self._codes}
        if descriptors:
            tall = {"Q": tile.queries, "DO": tile.queries, "K": tile.keys, "V": tile.keys}
            tensors |= {name: _described(x, tall[name]) for name, x in read.items()}
        constants = {
            **self._constants,
            **options,
            **{f"{_short(name)}_row": x.stride(0) for name, x in strided.items()},
            **{f"{_short(name)}_head": x.stride(1) for name, x in strided.items()},
            "BLOCK_M": tile.queries,
            "BLOCK_N": tile.keys,
            "STAGES": tile.stages,
            "TMA": descriptors,
        }
        # Floats always: Triton would build a whole number 1 into the kernel, which then serves other factors, too.
        factors = {**{name: float(x) for name, x in numbers.items()}, "half_alpha": self.alpha / 2}
        known = set(kernel.arg_names)
        start_kernel(
            kernel,
            (num_programs,),
            tensors,
            {name: x for name, x in factors.items() if name in known},
            {**{name: x for name, x in constants.items() if name in known}, "num_warps": tile.warps},
        )


class _Compiled(NamedTuple):
    """A compiled kernel, its arguments in order, and the places of those that change from call to call."""

    kernel: Any
    arguments: list[Any]
    places: dict[str, int]


_compiled: dict[tuple[Any, ...], _Compiled] = {}


def start_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: dict[str, Any],
    numbers: dict[str, float],
    constants: dict[str, Any],
) -> None:
    """kernel[grid](**tensors, **numbers, **constants), remembering the compiled kernel by its constants.

    Triton looks at every argument again to find it: about 0.3 ms for the forty of an attention kernel on the machine of
    the H200 results, longer than the kernel runs. Here only the kinds of the tensors and the constants decide. So
    numbers must be floats, or ones that the kernel promises not to be compiled for (`do_not_specialize`).
    """
    kinds = tuple(_kind(x) for x in tensors.values())
    if hasattr(kernel, "params") and all(kinds):
        key = (kernel, *kinds, *constants.values(), torch.cuda.current_device())
        known = _compiled.get(key)
        if known is not None:
            arguments = known.arguments.copy()
            for name, place in known.places.items():
                arguments[place] = tensors[name] if name in tensors else numbers[name]
            known.kernel[(*grid, 1, 1)[:3]](*arguments)
            return
    else:
        key = None
    _check_numbers(kernel, numbers)
    named = {**tensors, **numbers, **{name: _constant(x) for name, x in constants.items()}}
    made = kernel[grid](**named)
    if key is not None:
        names = [param.name for param in kernel.params]
        places = {name: names.index(name) for name in (*tensors, *numbers)}
        # Only what stays the same is remembered: a tensor kept here would never be freed.
        fixed = [None if name in places else named[name] for name in names]
        _compiled[key] = _Compiled(made, fixed, places)


def _check_numbers(kernel: Any, numbers: dict[str, float]) -> None:
    """Triton builds whole numbers that are 1, or multiples of 16, into a kernel, which then would serve others, too."""
    promised = getattr(kernel, "do_not_specialize", None)
    if promised is None:  # as the interpreter keeps it
        promised = getattr(kernel, "kwargs", {}).get("do_not_specialize") or ()
    wrong = [name for name, x in numbers.items() if isinstance(x, int) and name not in promised]
    assert not wrong, f"{kernel}: {wrong} must be in do_not_specialize"


def _kind(x: Any) -> Any:
    """What of a tensor or descriptor Triton compiles for; None where memory is not aligned, so it must look itself."""
    if isinstance(x, Tensor):
        return x.dtype if x.data_ptr() % 16 == 0 else None
    return x.base.dtype


def _constant(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        from triton import language as tl

        return getattr(tl, str(x).removeprefix("torch."))
    return x


def _short(name: str) -> str:
    return "o" if name == "Out" else name.lower()


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
