"""Memory shared by ranks of one machine. It never has a name, so nothing is left behind, however a rank ends.

Rank 0 makes an anonymous file (memfd) and hands it to the others over a unix socket that only processes of the same
user can call. The memory is gone when the last process that maps it has ended, killed or not.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from freescale.comm.rings.rounds import CACHE_LINE, Rings
from freescale.comm.world import PrivateListener, call, gather
from freescale.errors import TrainingError

T = TypeVar("T")

_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
WORDS_A_FLAG = CACHE_LINE // 4


class _Seconds(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMemory:
    """Bytes that every rank of a group maps.

    Args:
        file: an open file of at least this size.
        num_bytes: how much of it is mapped.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        self._map = mmap.mmap(file, num_bytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.words = self.bytes[: num_bytes - num_bytes % 4].view(np.uint32)
        self.address = int(self.bytes.ctypes.data)

    def sleep_on(self, flag: int, value: int, timeout_s: float) -> None:
        """Until a flag has another value, or the time is over, or for no reason at all."""
        call = _FUTEX.get(platform.machine())
        if call is None:
            time.sleep(min(timeout_s, 0.0002))
            return
        whole = int(timeout_s)
        limit = _Seconds(whole, int(1e9 * (timeout_s - whole)))
        place = ctypes.c_void_p(self.address + CACHE_LINE * flag)
        _libc().syscall(call, place, _FUTEX_WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)

    def wake(self, flag: int) -> None:
        """Let everybody who sleeps on a flag look at it again."""
        call = _FUTEX.get(platform.machine())
        if call is not None:
            place = ctypes.c_void_p(self.address + CACHE_LINE * flag)
            _libc().syscall(call, place, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def share_memory(group: dist.ProcessGroup, rings: Rings, *, timeout_s: float) -> SharedMemory:
    """Memory for the rings of a group, its flags at their first epoch; every rank must call it."""
    with ExitStack() as stack:
        names = [""]
        if dist.get_rank(group) == 0:
            listener = stack.enter_context(PrivateListener(rings.num_ranks))
            names = [listener.name]
        dist.broadcast_object_list(names, group=group, group_src=0)
        return together(
            group,
            lambda: (
                _hand_out(listener, rings, timeout_s)
                if dist.get_rank(group) == 0
                else _take(names[0], dist.get_rank(group), rings, timeout_s)
            ),
            what="shared memory cannot be set up",
        )


def together(group: dist.ProcessGroup, act: Callable[[], T], *, what: str) -> T:
    """Do something on every rank; if it fails on one, all of them say so, instead of waiting for each other."""
    result, problem = None, None
    try:
        result = act()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    for rank, each in enumerate(gather(problem, group=group)):
        if each is not None:
            raise TrainingError(f"{what}: on rank {rank}, {each}", next_step="comm.transport=collective")
    return result  # type: ignore[return-value]


def _hand_out(listener: PrivateListener, rings: Rings, timeout_s: float) -> SharedMemory:
    file = os.memfd_create("freescale")
    try:
        os.ftruncate(file, rings.total_bytes)
        memory = SharedMemory(file, rings.total_bytes)
        if rings.first_epoch:
            memory.words[: WORDS_A_FLAG * rings.num_flags : WORDS_A_FLAG] = rings.first_epoch
        for caller in listener.accept(range(1, rings.num_ranks), timeout_s=timeout_s).values():
            with caller:
                socket.send_fds(caller, [b"m"], [file])
        return memory
    finally:
        os.close(file)


def _take(name: str, rank: int, rings: Rings, timeout_s: float) -> SharedMemory:
    with call(name, rank=rank, timeout_s=timeout_s) as caller:
        _, files, _, _ = socket.recv_fds(caller, 1, 1)
    if not files:
        raise ConnectionError("rank 0 did not hand out its memory")
    try:
        return SharedMemory(files[0], rings.total_bytes)
    finally:
        os.close(files[0])
