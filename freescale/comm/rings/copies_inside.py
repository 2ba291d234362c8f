"""Copies inside one GPU: one kernel for all that are asked for at a time.

The driver makes each of them by a kernel of its own, under MPS, too (a kernel that holds all threads of an SM holds it
up, one that holds all shared memory does not). Each waits for blocks of a product to end, and by the next the product
behind it has begun: beside products of 9.5 ms a call for eight copies of 0.5 MiB took 27 ms, one for a copy of 4 MiB 9.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Sequence

from freescale.comm.rings.cuda_driver import Copy, CudaDriver

MOST_COPIES = 128
"""Kernels take 4 KiB of arguments, a copy is 24 bytes of them."""

_THREADS, _MOST_BLOCKS = 512, 64
_AT_A_TIME = 4
"""Words that a thread reads before it writes the first, as the kernel has it."""

_TABLE = 24 * MOST_COPIES

# One row of blocks a copy. Each thread reads four words, a grid apart, before it writes the first.
_KERNEL = """
.visible .entry copy_pieces_{size}(.param .align 8 .b8 table[{table}])
{{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .{word} %w<16>;
    .reg .b64 %d<17>;
    mov.b64 %d0, table;
    mov.u32 %r0, %ctaid.y;
    mul.wide.u32 %d1, %r0, 24;
    add.s64 %d1, %d0, %d1;
    ld.param.u64 %d2, [%d1];
    ld.param.u64 %d3, [%d1+8];
    ld.param.u64 %d4, [%d1+16];
    cvta.to.global.u64 %d2, %d2;
    cvta.to.global.u64 %d3, %d3;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    mul.wide.u32 %d5, %r4, {size};
    mov.u32 %r5, %nctaid.x;
    mul.lo.u32 %r5, %r5, %r2;
    mul.wide.u32 %d6, %r5, {size};
    mul.lo.u64 %d7, %d6, 3;
FOUR:
    add.s64 %d8, %d5, %d7;
    setp.ge.u64 %p0, %d8, %d4;
    @%p0 bra ONE;
    add.s64 %d9, %d3, %d5;
    add.s64 %d10, %d9, %d6;
    add.s64 %d11, %d10, %d6;
    add.s64 %d12, %d11, %d6;
    ld.global.{vector} {first}, [%d9];
    ld.global.{vector} {second}, [%d10];
    ld.global.{vector} {third}, [%d11];
    ld.global.{vector} {fourth}, [%d12];
    add.s64 %d13, %d2, %d5;
    add.s64 %d14, %d13, %d6;
    add.s64 %d15, %d14, %d6;
    add.s64 %d16, %d15, %d6;
    st.global.{vector} [%d13], {first};
    st.global.{vector} [%d14], {second};
    st.global.{vector} [%d15], {third};
    st.global.{vector} [%d16], {fourth};
    add.s64 %d5, %d8, %d6;
    bra FOUR;
ONE:
    setp.ge.u64 %p1, %d5, %d4;
    @%p1 bra END;
    add.s64 %d9, %d3, %d5;
    ld.global.{vector} {first}, [%d9];
    add.s64 %d13, %d2, %d5;
    st.global.{vector} [%d13], {first};
    add.s64 %d5, %d5, %d6;
    bra ONE;
END:
    ret;
}}
"""


def _kernel(size: int) -> str:
    """That for words of 16 bytes, or of 4, or of 1."""
    names = [f"%w{number}" for number in range(16)]
    if size == 16:
        words = ["{" + ", ".join(names[first : first + 4]) + "}" for first in range(0, 16, 4)]
        word, vector = "b32", "v4.u32"
    else:
        words, word, vector = names[:4], "b32" if size == 4 else "b16", f"u{8 * size}"
    places = dict(zip(("first", "second", "third", "fourth"), words))
    return _KERNEL.format(size=size, table=_TABLE, word=word, vector=vector, **places)


WORDS = (16, 4, 1)
"""The widest that divides all addresses and sizes is used."""

PTX = ".version 7.0\n.target sm_75\n.address_size 64\n" + "".join(map(_kernel, WORDS))


class DriverInside(CudaDriver):
    """The driver of a GPU that all ranks share. Nothing may be under way on it in this process when it is made.

    Args:
        device: the GPU.
    """

    def __init__(self, device: int) -> None:
        super().__init__()
        self.use(device)
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), PTX.encode())
        self._kernels: dict[int, ctypes.c_void_p] = {}
        for size in WORDS:
            kernel = self._kernels[size] = ctypes.c_void_p()
            name = f"copy_pieces_{size}".encode()
            self._call("cuModuleGetFunction", ctypes.byref(kernel), module, name)
            # What is first used beside a stream that waits would wait for it.
            self._launch(size, [(0, 0, 0)], 0)
        self._call("cuCtxSynchronize")

    def copy(self, copies: Sequence[Copy], stream: int) -> None:
        """Queue copies, in any order among themselves, all inside this GPU."""
        for first in range(0, len(copies), MOST_COPIES):
            part = copies[first : first + MOST_COPIES]
            self._launch(word_of(part), part, stream)

    def _launch(self, size: int, copies: Sequence[Copy], stream: int) -> None:
        table = ctypes.create_string_buffer(
            struct.pack(f"={3 * len(copies)}Q", *(number for copy in copies for number in copy)), _TABLE
        )
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(table))
        most = max(num_bytes for _, _, num_bytes in copies)
        blocks = min(_MOST_BLOCKS, max(1, -(-most // (_THREADS * _AT_A_TIME * size))))
        grid, block = (blocks, len(copies), 1), (_THREADS, 1, 1)
        launch = (self._kernels[size], *grid, *block, 0, ctypes.c_void_p(stream), arguments, None)
        self._call("cuLaunchKernel", *launch)


def word_of(copies: Sequence[Copy]) -> int:
    """Bytes of the widest word that divides all addresses and sizes."""
    bits = functools.reduce(operator.or_, (number for copy in copies for number in copy), 0)
    return next(size for size in WORDS if bits % size == 0)
