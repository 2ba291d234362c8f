"""The few calls of the CUDA driver that torch does not offer: copies by address, flags written and awaited by streams.

A stream memory operation is carried out by the front end of the GPU that reads a stream, not by its SMs: a stream can
write a word and wait for a word without a kernel. Tests put a record of the calls in the driver's place.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from freescale.errors import TrainingError

_LIBRARY = "libcuda.so.1"
_WAIT_32, _WRITE_32 = 1, 2
_PORTABLE, _MAPPED = 1, 2
# operation, address, value, flags (0: wait until cyclic difference >= 0; write after all that went before), alias.
_OPERATION = "IxxxxQQIxxxxQxxxxxxxx"
MOST_OPERATIONS = 255
_FEWEST_QUEUES = 8
_STREAM_ORDER, _BESIDE_COMPUTE = 1, 1

Copy = tuple[int, int, int]
"""Target address, source address, number of bytes."""
Word = tuple[int, int]
"""Address and value of a 32-bit word."""


class Driver(Protocol):
    """What engines ask of the driver; all addresses are those a GPU uses."""

    def use(self, device: int) -> None:
        """Let this thread call for a GPU."""

    def register(self, address: int, num_bytes: int) -> int:
        """Pin memory of the host for all contexts; its address on the GPU."""

    def unregister(self, address: int) -> None:
        """Let go of it."""

    def copy(self, copies: Sequence[Copy], stream: int) -> None:
        """Queue copies, in any order among themselves."""

    def flags(self, stream: int, *, write: Sequence[Word] = (), wait: Sequence[Word] = ()) -> None:
        """Queue writes of words, then waits until each of some words has reached a value or gone past it."""


class CudaDriver:
    """The driver of this machine.

    Args:
        batched: queue several copies by one call where the driver can.
    """

    def __init__(self, *, batched: bool = False) -> None:
        self._library = load_library()
        batch = getattr(self._library, "cuMemcpyBatchAsync_v2", None) if batched else None
        self._batch = batch
        self._threads = threading.local()
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def use(self, device: int) -> None:
        """Let this thread call for a GPU: a context is current in one thread only."""
        if getattr(self._threads, "device", None) == device:
            return
        if device not in self._contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(handle), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", self._contexts[device])
        self._threads.device = device

    def register(self, address: int, num_bytes: int) -> int:
        """Pin memory of the host for all contexts; its address on the GPU."""
        place = ctypes.c_void_p(address)
        self._call("cuMemHostRegister_v2", place, ctypes.c_size_t(num_bytes), _PORTABLE | _MAPPED)
        on_gpu = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(on_gpu), place, 0)
        return on_gpu.value

    def unregister(self, address: int) -> None:
        """Let go of it."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def copy(self, copies: Sequence[Copy], stream: int) -> None:
        """Queue copies; the driver sees from the addresses which way they go."""
        if self._batch is not None and len(copies) > 1:
            self._copy_batch(copies, stream)
            return
        queue = self._library.cuMemcpyAsync
        for target, source, num_bytes in copies:
            result = queue(target, source, num_bytes, stream)
            if result:
                self._check("cuMemcpyAsync", result)

    def flags(self, stream: int, *, write: Sequence[Word] = (), wait: Sequence[Word] = ()) -> None:
        """Queue writes of words, then waits for words, in as few calls as the driver allows."""
        operations = [(_WRITE_32, *word) for word in write] + [(_WAIT_32, *word) for word in wait]
        for first in range(0, len(operations), MOST_OPERATIONS):
            part = operations[first : first + MOST_OPERATIONS]
            packed = pack_operations(part)
            self._call("cuStreamBatchMemOp_v2", stream, len(part), packed, 0)

    def _copy_batch(self, copies: Sequence[Copy], stream: int) -> None:
        count = len(copies)
        targets, sources, sizes = ((ctypes.c_uint64 * count)(*column) for column in zip(*copies))
        # Order of source accesses, two places that may stay unknown (type and id), flags.
        attributes = struct.pack("=IIiIiI", _STREAM_ORDER, 0, 0, 0, 0, _BESIDE_COMPUTE)
        assert self._batch is not None
        self._check(
            "cuMemcpyBatchAsync_v2",
            self._batch(
                targets,
                sources,
                sizes,
                ctypes.c_size_t(count),
                attributes,
                (ctypes.c_size_t * 1)(0),
                ctypes.c_size_t(1),
                ctypes.c_void_p(stream),
            ),
        )

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, result: int) -> None:
        if result == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(result, ctypes.byref(text))
        raise TrainingError(
            f"the CUDA driver refused {name}",
            got=(text.value or b"an unknown error").decode(),
            next_step="comm.transport=collective goes without; `freescale doctor` tests each transport",
        )


def pack_operations(operations: Sequence[tuple[int, int, int]]) -> bytes:
    """Operations (kind, address, value) as the driver reads them: 48 bytes each."""
    flat = [number for kind, address, value in operations for number in (kind, address, value, 0, 0)]
    return _layout(len(operations)).pack(*flat)


@functools.cache
def _layout(count: int) -> struct.Struct:
    return struct.Struct("=" + count * _OPERATION)


@functools.cache
def load_library() -> ctypes.CDLL:
    """The driver's library; OSError where there is none."""
    library = ctypes.CDLL(_LIBRARY)
    # Known types halve the time of the two calls that are made often.
    address, size, stream = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    library.cuMemcpyAsync.argtypes = [address, address, size, stream]
    library.cuStreamBatchMemOp_v2.argtypes = [stream, ctypes.c_uint, ctypes.c_char_p, ctypes.c_uint]
    return library


def missing_driver() -> str | None:
    """What is missing for these calls; None if nothing is."""
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if queues.isdigit() and int(queues) < _FEWEST_QUEUES:
        return (
            f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: streams that wait would stop those that compute; unset it"
        )
    try:
        load_library()
    except OSError as error:
        return f"the CUDA driver cannot be loaded ({error})"
    except AttributeError as error:
        return f"this CUDA driver is too old for stream memory operations ({error})"
    return None
