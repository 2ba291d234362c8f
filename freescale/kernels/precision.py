"""How exactly kernels multiply: what `torch.set_float32_matmul_precision` asks for, as Triton names it."""

from __future__ import annotations

import torch

EXACT = "ieee"
"""Outside the tensor cores: as torch multiplies float32 unless told otherwise."""


def product_precision(dtype: torch.dtype) -> str:
    """Of products of numbers of this type; it means something for float32 alone."""
    rounded = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounded else EXACT
