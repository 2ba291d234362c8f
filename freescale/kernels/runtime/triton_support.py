"""Where the fused kernels over rows can run."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.attention.api import has_triton

# A program holds whole rows in registers.
_MAX_WIDTH = 4096


def can_fuse(x: Tensor, *, width: int = 0) -> bool:
    """Whether rows like these, or of `width` numbers where that is more, can be worked on by the fused kernels."""
    fits = max(width, x.shape[-1]) <= _MAX_WIDTH and x.dtype != torch.float64 and x.shape[0] > 0
    return x.is_cuda and fits and has_triton()
