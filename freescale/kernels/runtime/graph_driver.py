"""The few calls of the CUDA driver that look into a recorded graph and put a kernel in the place of a node.

Unversioned names are the driver's oldest forms of these calls, which it keeps. They know edges of one kind; where a
node has others, they say so.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

_LIBRARY = "libcuda.so.1"
_MEMSET = 2
_WORD_OF = {1: 0x01010101, 2: 0x00010001, 4: 1}
MOST_WORDS = 1024
"""A block has so many threads at most."""

FILL = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry fill_words(.param .u64 target, .param .u32 value)
{
    .reg .b32 %r<3>;
    .reg .b64 %d<5>;
    ld.param.u64 %d1, [target];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %d2, %d1;
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %d3, %r2, 4;
    add.s64 %d4, %d2, %d3;
    st.global.u32 [%d4], %r1;
    ret;
}
"""


class GraphError(RuntimeError):
    """The driver refused a call about a graph."""


class Fill(NamedTuple):
    """Words that are given one value: first address, how many, the value."""

    address: int
    num_words: int
    word: int


class _Memset(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
    )


class GraphDriver:
    """The driver of a machine, for the GPU that is current.

    Args:
        library: with its calls.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._function = ctypes.c_void_p()

    def load(self) -> None:
        """The kernel that fills."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), FILL)
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, b"fill_words")

    def nodes(self, graph: int) -> list[int]:
        """All of them."""
        return self._listed("cuGraphGetNodes", graph)

    def fill_of(self, node: int) -> Fill | None:
        """What a node fills, if it is a memset of a few words."""
        kind = ctypes.c_int()
        self._call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value != _MEMSET:
            return None
        found = _Memset()
        self._call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(node), ctypes.byref(found))
        num_bytes = found.width * found.element_bytes
        whole_words = found.height == 1 and num_bytes % 4 == 0 and found.address % 4 == 0
        if not whole_words or not 0 < num_bytes <= 4 * MOST_WORDS:
            return None
        word = (found.value & ((1 << 8 * found.element_bytes) - 1)) * _WORD_OF[found.element_bytes]
        return Fill(found.address, num_bytes // 4, word)

    def before(self, node: int) -> list[int]:
        """The nodes that it waits for."""
        return self._listed("cuGraphNodeGetDependencies", node)

    def behind(self, node: int) -> list[int]:
        """The nodes that wait for it."""
        return self._listed("cuGraphNodeGetDependentNodes", node)

    def add(self, graph: int, fill: Fill, *, before: Sequence[int]) -> int:
        """A kernel that fills, behind these nodes."""
        values = (ctypes.c_uint64(fill.address), ctypes.c_uint32(fill.word))
        arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(each) for each in values))
        kernel = _Kernel(self._function, (1, 1, 1), (fill.num_words, 1, 1), 0, arguments, None)
        made = ctypes.c_void_p()
        self._call(
            "cuGraphAddKernelNode",
            ctypes.byref(made),
            ctypes.c_void_p(graph),
            _handles(before),
            ctypes.c_size_t(len(before)),
            ctypes.byref(kernel),
        )
        assert made.value is not None
        return made.value

    def connect(self, graph: int, node: int, *, behind: Sequence[int]) -> None:
        """Let these nodes wait for it."""
        if behind:
            froms, tos = _handles([node] * len(behind)), _handles(behind)
            count = ctypes.c_size_t(len(behind))
            self._call("cuGraphAddDependencies", ctypes.c_void_p(graph), froms, tos, count)

    def remove(self, node: int) -> None:
        """And whatever connects it."""
        self._call("cuGraphDestroyNode", ctypes.c_void_p(node))

    def _listed(self, name: str, handle: int) -> list[int]:
        count = ctypes.c_size_t()
        self._call(name, ctypes.c_void_p(handle), None, ctypes.byref(count))
        found = (ctypes.c_void_p * count.value)()
        if count.value:
            self._call(name, ctypes.c_void_p(handle), found, ctypes.byref(count))
        return [each for each in found if each is not None]

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise GraphError(f"this driver has no {name}")
        result = function(*arguments)
        if result:
            raise GraphError(f"{name}: error {result}")


def _handles(nodes: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(nodes))(*nodes)


@functools.cache
def driver_of(device: int) -> GraphDriver | str:
    """For graphs of this GPU, which is the current one; a text where its driver does not have what it takes."""
    try:
        driver = GraphDriver(ctypes.CDLL(_LIBRARY))
        driver.load()
    except (OSError, GraphError) as error:
        return str(error)
    return driver
