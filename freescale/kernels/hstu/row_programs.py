"""How kernels that work on whole rows are started: rows a program, and what a mask is to them."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from freescale.kernels.dropout import Masked
from freescale.kernels.runtime import start_kernel

# Numbers a program works on; backwards hold several of each in registers, and with half as many twice as many programs
# fit on an SM.
MANY, FEW = 4096, 2048
NOTHING_DROPPED: dict[str, Any] = {"THRESHOLD": 0, "SCALE": 1.0}


def mask_numbers(mask: Masked) -> tuple[Tensor, int, dict[str, Any]]:
    """Keys, site, and what kernels are compiled for."""
    return mask.keys, mask.site, {"THRESHOLD": mask.threshold, "SCALE": mask.scale}


def by_rows(
    kernel: Any,
    width: int,
    tensors: dict[str, Tensor],
    constants: dict[str, Any],
    *,
    numbers: int = MANY,
    **values: int,
) -> None:
    """Start a kernel over all rows of its first tensor."""
    num_rows, shape = next(iter(tensors.values())).shape[0], rows_shape(width, numbers)
    grid = (-(-num_rows // shape["ROWS"]),)
    start_kernel(kernel, grid, tensors, {"num_rows": num_rows, **values}, {**constants, **shape})


@cache
def rows_shape(width: int, numbers: int) -> dict[str, int]:
    """Rows of about so many numbers a program."""
    block = max(16, 1 << (width - 1).bit_length())
    rows = max(1, numbers // block)
    return {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": 4 if block <= 1024 else 8}
