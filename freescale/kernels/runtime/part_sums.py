"""Parts of several ranks added up in their order, by one kernel on a GPU.

Beside compute that fills a GPU every kernel of another stream waits until blocks of that end, 50 us and more however
little it does: adding up four parts and laying the sum out for four receivers took five of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.runtime.launch import kernels_of, start_kernel
from freescale.kernels.runtime.triton_support import has_triton

_BLOCK = 1024


def sum_parts(parts: Tensor, *, copies: int = 1) -> Tensor:
    """[copies x n] the sum of parts [num_parts, n], added one after the other, as often as asked for."""
    if not (parts.is_cuda and parts.dtype == torch.float32 and parts.is_contiguous() and has_triton()):
        return sum_parts_reference(parts, copies=copies)
    num_parts, count = parts.shape
    sums = parts.new_empty(copies * count)
    if count:
        start_kernel(
            kernels_of("runtime.sum_kernel").sum_parts_kernel,
            (-(-count // _BLOCK),),
            {"Parts": parts, "Sums": sums},
            {"count": count},
            {"PARTS": num_parts, "COPIES": copies, "BLOCK": _BLOCK, "num_warps": 4},
        )
    return sums


def sum_parts_reference(parts: Tensor, *, copies: int = 1) -> Tensor:
    """The same by one addition after the other."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total if copies == 1 else total.repeat(copies)
