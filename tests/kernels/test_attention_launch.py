"""Numbers given to a kernel are never built into it: compiled kernels are remembered without looking at them."""

from __future__ import annotations

import pytest
import torch

from freescale.kernels.kernel_start import start_kernel

triton = pytest.importorskip("triton")


@triton.jit
def specialised_kernel(X, count):  # type: ignore[no-untyped-def]
    pass


@triton.jit(do_not_specialize=["count"])
def free_kernel(X, count):  # type: ignore[no-untyped-def]
    pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels on CPU tensors are for the interpreter")
def test_whole_numbers_that_triton_would_build_in_are_refused() -> None:
    tensors = {"X": torch.zeros(4)}
    with pytest.raises(AssertionError, match="'count'"):
        start_kernel(specialised_kernel, (1,), tensors, {"count": 16}, {})
    start_kernel(specialised_kernel, (1,), tensors, {"count": 16.0}, {})
    start_kernel(free_kernel, (1,), tensors, {"count": 16}, {})
