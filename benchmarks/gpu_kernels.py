"""A kernel that copies with so many blocks, for measuring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freescale.prove.hog import Hog, compile_kernel

__all__ = ["BlockCopy", "Hog", "compile_kernel"]

_COPY = r"""
extern "C" __global__ void copy_blocks(int4* target, const int4* source, int num_vectors) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num_vectors; i += gridDim.x * blockDim.x)
        target[i] = source[i];
}
"""


class BlockCopy:
    """Copies 16 bytes a thread with this many blocks: what NCCL's channels take from the SMs.

    Args:
        num_blocks: of 512 threads each.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._kernel: Any = compile_kernel(_COPY, "copy_blocks")

    def __call__(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Contiguous tensors of one size, a multiple of 16 bytes, on any mapped memory."""
        self._kernel(
            grid=(self._num_blocks, 1, 1),
            block=(512, 1, 1),
            args=[target, source, source.nbytes // 16],
            stream=stream or torch.cuda.current_stream(),
        )
