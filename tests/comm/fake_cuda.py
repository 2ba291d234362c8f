"""Streams and a driver without a GPU: every stream is a thread that does what it was given, in order, on CPU memory."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from freescale.comm.rings.rounds import reached
from freescale.kernels.runtime.shared_flags import load_flag as load
from freescale.kernels.runtime.shared_flags import store_flag as store


class FakeEvent:
    def __init__(self) -> None:
        self._happened = threading.Event()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        self._happened.wait()

    def set(self) -> None:
        self._happened.set()


class FakeStream:
    """As much of torch.cuda.Stream as transports use."""

    by_handle: dict[int, FakeStream] = {}  # noqa: RUF012

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.cuda_stream = 1000 + len(FakeStream.by_handle)
        FakeStream.by_handle[self.cuda_stream] = self
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def give(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        self.give(event.set)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.give(event.synchronize)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def _run(self) -> None:
        while True:
            self._work.get()()


class FakeDriver:
    """Carries out copies and flags on CPU memory, and keeps a record of the calls."""

    def __init__(self, *, slow_s: float = 0.0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.registered: set[int] = set()
        self._slow_s = slow_s

    def use(self, device: int) -> None:
        pass

    def register(self, address: int, num_bytes: int) -> int:
        self.registered.add(address)
        return address

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def copy(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        for copy in copies:
            self.calls.append(("copy", stream, *copy))
            FakeStream.by_handle[stream].give(lambda copy=copy: self._copy(*copy))

    def flags(self, stream: int, *, write: Any = (), wait: Any = ()) -> None:
        self.calls.append(("flags", stream, list(write), list(wait)))
        FakeStream.by_handle[stream].give(lambda: self._flags(write, wait))

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        time.sleep(self._slow_s)
        ctypes.memmove(target, source, num_bytes)

    def _flags(self, write: Any, wait: Any) -> None:
        for address, value in write:
            store(word_at(address), 0, value)
        for address, value in wait:
            while not reached(load(word_at(address), 0), value):
                time.sleep(0.0002)


def word_at(address: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint32 * 1).from_address(address))


class _OnStream:
    """torch.cuda.stream(...) of fake streams: copies of tensors are given to them."""

    current: list[FakeStream] = []  # noqa: RUF012

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self.current.append(self._stream)

    def __exit__(self, *_: object) -> None:
        self.current.pop()


def install() -> FakeStream:
    """Put fakes in the place of torch's streams, in this process; the stream that is current from now on."""
    main = FakeStream()
    torch.cuda.Stream = FakeStream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda device=None: main  # type: ignore[assignment, return-value]
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentStream = lambda index: (0, index, 1)  # type: ignore[attr-defined]
    torch.cuda.current_device = lambda: 0
    torch.cuda.stream = _OnStream  # type: ignore[assignment, misc]
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    # Memory that a stream has yet to use is not given to anybody else: the stream holds on to it until then.
    torch.Tensor.record_stream = lambda self, stream: stream.give(lambda: self.data_ptr())  # type: ignore[method-assign, assignment]
    really_copy = torch.Tensor.copy_

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if _OnStream.current:
            _OnStream.current[-1].give(lambda: really_copy(target, source))
            return target
        return really_copy(target, source)

    torch.Tensor.copy_ = copy  # type: ignore[method-assign, assignment]
    return main
