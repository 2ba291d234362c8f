"""A kernel that holds every SM and does nothing: what ends beside it takes none.

It has to hold all threads of an SM. One that held all shared memory and half of the threads let kernels of the driver
in, by which it copies inside a GPU (most likely they lack the shared memory that CUDA keeps of every block of ours):
such copies ended beside it, and wait for a matrix product.
"""

from __future__ import annotations

import time
from typing import Any

import torch

_HOG = r"""
extern "C" __global__ void __launch_bounds__(THREADS, 2) hog(volatile int* release, volatile int* up, int limit_ms) {
    extern __shared__ char room[];
    room[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        up[blockIdx.x] = 1;
        __threadfence_system();
        do {
            __nanosleep(2000);
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        } while (*release == 0 && now - start < 1000000ull * limit_ms);
    }
    __syncthreads();
}
"""

_BLOCKS_AN_SM = 2
"""A block has at most 1,024 threads, and an SM 1,024 to 2,048."""

_RESERVED = 1024
"""Bytes of shared memory that CUDA keeps of each block."""


def compile_kernel(source: str, name: str) -> Any:
    """A kernel by torch's own compiler call, or, where torch finds no NVRTC, by that of cuda-bindings."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        # torch insists on a toolkit, whose headers these kernels do not need.
        cpp_extension.CUDA_HOME = "/usr/local/cuda"
    try:
        return torch.cuda._compile_kernel(source, name)
    except OSError:
        return torch.cuda._utils._cuda_load_module(_compiled_by_bindings(source), [name])[name]  # type: ignore[index]


def _compiled_by_bindings(source: str) -> bytes:
    from cuda.bindings import nvrtc  # type: ignore[import-not-found, unused-ignore]

    major, minor = torch.cuda.get_device_capability()
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    (failure,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()])
    if failure:
        raise RuntimeError(f"NVRTC: {failure}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    binary = b" " * size
    nvrtc.nvrtcGetCUBIN(program, binary)
    return binary


class Hog:
    """A kernel that takes all threads and all shared memory of every SM until it is released, or its time is over.

    Compiled and started once at construction: a kernel that is loaded while another spins waits for it.
    """

    def __init__(self, device: torch.device, *, limit_ms: int = 15_000) -> None:
        facts: Any = torch.cuda.get_device_properties(device)
        self.num_sms = facts.multi_processor_count
        self._num_blocks = self.num_sms * _BLOCKS_AN_SM
        self._threads = facts.max_threads_per_multi_processor // _BLOCKS_AN_SM
        self._shared = facts.shared_memory_per_multiprocessor // _BLOCKS_AN_SM - _RESERVED
        self._limit_ms = limit_ms
        self._kernel: Any = compile_kernel(_HOG.replace("THREADS", str(self._threads)), "hog")
        self._kernel.set_shared_memory_config(self._shared)
        self._stream = torch.cuda.Stream(device)
        self._release = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._up = torch.zeros(self._num_blocks, dtype=torch.int32, pin_memory=True)
        self._release.fill_(1)
        self._launch()
        self._stream.synchronize()

    def hold(self) -> None:
        """Until every SM is held."""
        self._release.zero_()
        self._up.zero_()
        self._launch()
        deadline = time.monotonic() + 5
        while (up := int(self._up.sum())) < self._num_blocks:
            if time.monotonic() > deadline:
                self.release()
                raise RuntimeError(
                    f"{up} of {self._num_blocks} blocks that hold {self.num_sms} SMs have begun"
                )

    @property
    def holds(self) -> bool:
        """Whether it is still there."""
        return not self._stream.query()

    def release(self) -> None:
        """Give the SMs back."""
        self._release.fill_(1)
        self._stream.synchronize()

    def _launch(self) -> None:
        self._kernel(
            grid=(self._num_blocks, 1, 1),
            block=(self._threads, 1, 1),
            args=[self._release, self._up, self._limit_ms],
            shared_mem=self._shared,
            stream=self._stream,
        )
