"""A transport whose copies are kernels of a given number of blocks: the stand-in for NCCL's use of SMs.

NCCL before 2.30 refuses two ranks on one GPU; nccl_ctas.py has the real thing for later ones. So here the windows and
flags of `copy_engine` are kept, and every copy into or out of a window is made by a kernel of N blocks instead: as many
SMs as N channels of NCCL would take from the compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from gpu_kernels import compile_kernel

from freescale.comm.rings.cuda_driver import Copy, CudaDriver
from freescale.comm.transport import Transport
from freescale.comm.transports import registry as choose
from freescale.comm.transports.kinds import copy_engine
from freescale.comm.world.facts import GroupFacts
from freescale.registry import register

_SOURCE = r"""
extern "C" __global__ void copy_bytes(char* target, const char* source, unsigned long long num_bytes) {
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long done = 0;
    if ((((unsigned long long)target | (unsigned long long)source) & 15) == 0) {
        unsigned long long vectors = num_bytes / 16;
        for (unsigned long long i = first; i < vectors; i += step)
            ((int4*)target)[i] = ((const int4*)source)[i];
        done = vectors * 16;
    }
    for (unsigned long long i = done + first; i < num_bytes; i += step)
        target[i] = source[i];
}
"""


class BlockDriver(CudaDriver):
    """The driver, with copies by kernels of this many blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self._num_blocks = num_blocks
        self._kernel: Any = compile_kernel(_SOURCE, "copy_bytes")

    def copy(self, copies: Sequence[Copy], stream: int) -> None:
        """One kernel a copy, in the order given."""
        for target, source, num_bytes in copies:
            values = (ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_uint64(num_bytes))
            pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
            launch = (self._kernel.func, self._num_blocks, 1, 1, 512, 1, 1, 0, ctypes.c_void_p(stream))
            self._call("cuLaunchKernel", *launch, pointers, None)


def route(num_blocks: int, *, name: str) -> type:
    """What is registered as a transport."""

    class CopyKernelRoute:
        keeps_group = False
        why_not = staticmethod(copy_engine.CopyEngineRoute.why_not)

        @staticmethod
        def build(group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
            transport = copy_engine.CopyEngineRoute.build(
                group, facts, timeout_s, driver=BlockDriver(num_blocks)
            )
            transport.name = name
            transport.engine = f"copy kernels of {num_blocks} blocks"
            transport.sm_free = False
            transport.reason = "a stand-in for NCCL, for measuring only"
            return transport

    return CopyKernelRoute


def register_all() -> None:
    """Let recipes and `make_transport` know it as copy_kernel:8, :16, :24 and :32."""
    for num_blocks in (8, 16, 24, 32):
        name = f"copy_kernel:{num_blocks}"
        register("transport", name)(route(num_blocks, name=name))


def take_the_place_of_collective(num_blocks: int) -> None:
    """For the GPU tensors of a whole training run; CPU tensors travel by the real one."""
    find, ours = choose.find_transport_kind, route(num_blocks, name="collective")

    class Either:
        keeps_group = True

        @staticmethod
        def why_not(facts: GroupFacts) -> str | None:
            return (ours if facts.on_gpu else find("collective")).why_not(facts)

        @staticmethod
        def build(group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
            return (ours if facts.on_gpu else find("collective")).build(group, facts, timeout_s)

    def found(name: str, **choices: Any) -> Any:
        return Either if name == "collective" else find(name, **choices)

    choose.find_transport_kind = found
