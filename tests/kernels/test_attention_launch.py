"""Starting kernels: the compiled kernel is found again, called with the new arguments, and keeps no tensor alive."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from freescale.kernels import attention_launch
from freescale.kernels.attention_launch import start_kernel


class FakeKernel:
    """Looks like a Triton kernel: params, kernel[grid](**arguments) compiles, compiled[grid](*arguments) runs."""

    def __init__(self):
        names = ["X", "factor", "x_row", "BLOCK"]
        self.params = [SimpleNamespace(name=name) for name in names]
        self.compiled, self.calls = 0, []

    def __getitem__(self, grid):
        def compile_and_run(**named):
            self.compiled += 1
            self.calls.append((grid, named["factor"], named["x_row"], named["BLOCK"]))
            return SimpleCompiled(self)

        return compile_and_run


class SimpleCompiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda x, factor, row, block: self.kernel.calls.append((grid[:1], factor, row, block))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(attention_launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return FakeKernel()


def aligned(*shape, dtype=torch.float32):
    x = torch.empty(*shape, dtype=dtype)
    assert x.data_ptr() % 16 == 0
    return x


def test_a_second_call_runs_the_compiled_kernel_with_its_own_arguments(kernel):
    start_kernel(kernel, (3,), {"X": aligned(64)}, {"factor": 0.5}, {"x_row": 64, "BLOCK": 16})
    start_kernel(kernel, (7,), {"X": aligned(128)}, {"factor": 2.0}, {"x_row": 64, "BLOCK": 16})
    assert kernel.compiled == 1
    assert kernel.calls == [((3,), 0.5, 64, 16), ((7,), 2.0, 64, 16)]


@pytest.mark.parametrize(
    ("dtype", "constants"),
    [
        (torch.float16, {"x_row": 64, "BLOCK": 16}),
        (torch.float32, {"x_row": 65, "BLOCK": 16}),
        (torch.float32, {"x_row": 64, "BLOCK": 32}),
    ],
)
def test_another_type_stride_or_constant_is_compiled_anew(kernel, dtype, constants):
    start_kernel(kernel, (1,), {"X": aligned(64)}, {"factor": 1.0}, {"x_row": 64, "BLOCK": 16})
    start_kernel(kernel, (1,), {"X": aligned(64, dtype=dtype)}, {"factor": 1.0}, constants)
    assert kernel.compiled == 2


def test_memory_that_is_not_aligned_is_left_to_triton(kernel):
    odd = torch.empty(65)[1:]
    for _ in range(2):
        start_kernel(kernel, (1,), {"X": odd}, {"factor": 1.0}, {"x_row": 64, "BLOCK": 16})
    assert kernel.compiled == 2


def test_no_tensor_is_kept_alive(kernel):
    x = aligned(64)
    seen = weakref.ref(x)
    start_kernel(kernel, (1,), {"X": x}, {"factor": 1.0}, {"x_row": 64, "BLOCK": 16})
    del x
    gc.collect()
    assert seen() is None
