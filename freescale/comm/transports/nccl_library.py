"""NCCL called as a library: a communicator, windows and one-sided puts that torch before 2.12 does not reach.

torch links NCCL and passes on some of its functions. The rest is called here by ctypes, in the same library that torch
has loaded, or that was preloaded. Memory of windows is NCCL's own: torch gives none where the driver has no multicast.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freescale.errors import TrainingError

_SYMMETRIC, _UINT8, _ID_BYTES = 1, 1, 128
NEEDED = ("ncclMemAlloc", "ncclCommWindowRegister", "ncclPutSignal", "ncclWaitSignal")


class _UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class SignalsOf(ctypes.Structure):
    """ncclWaitSignalDesc_t: so many signals of a rank."""

    _fields_ = (
        ("count", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("signal", ctypes.c_int),
        ("context", ctypes.c_int),
    )


class _Memory:
    """Memory of a device as torch takes it over."""

    def __init__(self, at: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (at, False),
            "version": 3,
        }


class NcclLibrary:
    """The functions of the loaded library; what they complain about is raised."""

    def __init__(self, functions: Any = None) -> None:
        self._functions = ctypes.CDLL(None) if functions is None else functions
        self._functions.ncclGetErrorString.restype = ctypes.c_char_p
        self._functions.ncclGetLastError.restype = ctypes.c_char_p

    def call(self, name: str, *given: Any) -> None:
        """One function.

        Raises:
            TrainingError: it has failed.
        """
        code = getattr(self._functions, name)(*given)
        if code:
            error = self._functions.ncclGetErrorString(code).decode()
            last = (self._functions.ncclGetLastError(None) or b"").decode().strip()
            raise TrainingError(f"NCCL's {name} failed: {error}", got=last or None)


def missing_functions() -> str | None:
    """The first function needed here that the loaded library does not have; None: it has all."""
    try:
        functions = ctypes.CDLL(None)
    except OSError:
        return NEEDED[0]
    return next((name for name in NEEDED if not hasattr(functions, name)), None)


class OwnCommunicator:
    """A communicator that torch does not know of; every rank must make it, with its device being the current one.

    Args:
        rank: this one.
        num_ranks: how many there are.
        share: brings bytes of rank 0 to all ranks.
        library: NCCL's functions.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        share: Callable[[bytes], bytes],
        library: NcclLibrary | None = None,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.library = NcclLibrary() if library is None else library
        torch.zeros(1, device="cuda")  # makes this process's context, in which NCCL then works
        name = _UniqueId()
        if rank == 0:
            self.library.call("ncclGetUniqueId", ctypes.byref(name))
        ctypes.memmove(ctypes.byref(name), share(bytes(name)), _ID_BYTES)
        self.handle = ctypes.c_void_p()
        self.library.call(
            "ncclCommInitRank", ctypes.byref(self.handle), ctypes.c_int(num_ranks), name, ctypes.c_int(rank)
        )


class LibraryWindow:
    """Memory that every rank of a communicator can put bytes into; all of them open it together.

    It stays until the process ends: to give it back would take all ranks at once.

    Args:
        communicator: whose ranks.
        num_bytes: of each.
    """

    def __init__(self, communicator: OwnCommunicator, num_bytes: int) -> None:
        self._communicator, self._call = communicator, communicator.library.call
        at, self.handle = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("ncclMemAlloc", ctypes.byref(at), ctypes.c_size_t(num_bytes))
        self._call(
            *("ncclCommWindowRegister", communicator.handle, at, ctypes.c_size_t(num_bytes)),
            *(ctypes.byref(self.handle), ctypes.c_int(_SYMMETRIC)),
        )
        assert at.value is not None
        self.memory: Tensor = torch.as_tensor(_Memory(at.value, num_bytes), device="cuda").zero_()

    def put(self, first_byte: int, num_bytes: int, *, target: int, target_byte: int) -> None:
        """Copy bytes of this window into another rank's, and signal it; ordered with the current stream."""
        self.put_into(self, first_byte, num_bytes, target=target, target_byte=target_byte)

    def put_into(
        self, window: LibraryWindow, first_byte: int, num_bytes: int, *, target: int, target_byte: int
    ) -> None:
        """The same into another window."""
        self._call(
            *(
                "ncclPutSignal",
                ctypes.c_void_p(self.memory.data_ptr() + first_byte),
                ctypes.c_size_t(num_bytes),
            ),
            *(ctypes.c_int(_UINT8), ctypes.c_int(target), window.handle, ctypes.c_size_t(target_byte)),
            *(ctypes.c_int(0), ctypes.c_int(0), ctypes.c_uint(0)),
            *(self._communicator.handle, current_stream()),
        )

    def wait_signal(self, source: int) -> None:
        """Let the current stream wait for one signal of a rank, and take it."""
        wanted = (SignalsOf * 1)(SignalsOf(1, source, 0, 0))
        self._call("ncclWaitSignal", ctypes.c_int(1), wanted, self._communicator.handle, current_stream())


def all_to_all(sent: LibraryWindow, received: LibraryWindow, num_bytes: int) -> None:
    """So many bytes from the start of one window to every rank's other one, by rank."""
    communicator = sent._communicator
    communicator.library.call(
        *("ncclAlltoAll", ctypes.c_void_p(sent.memory.data_ptr())),
        *(ctypes.c_void_p(received.memory.data_ptr()), ctypes.c_size_t(num_bytes), ctypes.c_int(_UINT8)),
        *(communicator.handle, current_stream()),
    )


def current_stream() -> ctypes.c_void_p:
    """Where the calling thread's work goes."""
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
