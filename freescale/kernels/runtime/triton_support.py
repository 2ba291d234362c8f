"""What Triton can do here: whether kernels can be compiled, and whether the fused ones over rows can run."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

# A program holds whole rows in registers.
_MAX_WIDTH = 4096


def can_fuse(x: Tensor, *, width: int = 0) -> bool:
    """Whether rows like these, or of `width` numbers where that is more, can be worked on by the fused kernels."""
    fits = max(width, x.shape[-1]) <= _MAX_WIDTH and x.dtype != torch.float64 and x.shape[0] > 0
    return x.is_cuda and fits and has_triton()


@cache
def has_triton() -> bool:
    """Whether the kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None
