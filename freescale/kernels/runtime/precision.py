"""How exactly kernels multiply: what `torch.set_float32_matmul_precision` asks for, as Triton names it."""

from __future__ import annotations

import torch


def product_precision(dtype: torch.dtype) -> str:
    """Of products of numbers of this type.

    float32 is multiplied by the tensor cores, either way: rounded to TF32 if torch may do so, else as three products of
    TF32 parts, which leave out less than a 2^-21 of a number. Outside the tensor cores it would take several times as
    long, to compile as well.
    """
    if dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
