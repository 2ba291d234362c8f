"""Tables planned on the CPU, brought to the device without waiting for it, and results brought back.

A copy from ordinary memory makes the caller wait until the GPU has done all that was asked of it before; from
page-locked memory it only queues. Small tables also go together: one copy for all of them. A copy into ordinary memory
keeps other threads from the driver while it waits; into page-locked memory, and waited for by an event, it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.kernels.runtime.readback import Readback

# Kernels compiled for aligned tensors take each table as one.
_ALIGN = 16

Array = npt.NDArray[Any]
Shapes = list[tuple[int, ...]]
Fill = Callable[[list[Array]], None]


class Carrier(Protocol):
    """Brings tables of whole numbers to a device."""

    def add(self, *arrays: Array) -> tuple[Tensor, ...]:
        """The arrays as tensors on the device."""

    def fill(self, name: Any, shapes: Shapes, fill: Fill) -> tuple[Tensor, ...]:
        """Arrays of int64 that `fill` writes, as tensors on the device."""


class Alone:
    """Carries what it is given at once, by a copy of its own.

    Args:
        device: where it goes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def add(self, *arrays: Array) -> tuple[Tensor, ...]:
        """The arrays as tensors on the device."""
        return to_device(*arrays, device=self._device)

    def fill(self, name: Any, shapes: Shapes, fill: Fill) -> tuple[Tensor, ...]:
        """Arrays of int64 that `fill` writes, as tensors on the device."""
        arrays = [np.empty(shape, np.int64) for shape in shapes]
        fill(arrays)
        return self.add(*arrays)


class Sealed:
    """Carries nothing: a recording would read it again when it is old."""

    def add(self, *arrays: Array) -> tuple[Tensor, ...]:
        """Refused."""
        raise RuntimeError("a list was asked for that does not travel with the batch")

    def fill(self, name: Any, shapes: Shapes, fill: Fill) -> tuple[Tensor, ...]:
        """Refused."""
        return self.add()


class HostRoom:
    """Memory that tables are written into one after the other, each beginning at a multiple of 16.

    Args:
        flat: its bytes.

    `filled` are the bytes taken so far.
    """

    def __init__(self, flat: npt.NDArray[np.uint8]) -> None:
        self._flat = flat
        self.filled = 0

    def room_for(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array in it, to be filled; there must be room."""
        kind = np.dtype(dtype)
        begin, end = self.filled, self.filled + kind.itemsize * math.prod(shape)
        self.filled = _aligned(end)
        return self._flat[begin:end].view(kind).reshape(shape)


class Parcel(HostRoom):
    """Tables that travel together: each is put in when it is made, and one copy brings all of them to the device.

    Apart, a table of a few KB takes longer to send than to make. What is returned may be read after `send`.

    Args:
        device: where they go.
        room: bytes; what does not fit any more travels alone.
        into: memory of the device to fill; new memory unless given.

    `filled` and `wanted` are the bytes in it, and with those that found no room; `shapes` of all that was put in, and
    `filled_in` the names and shapes of what `fill` wrote, in their order.
    """

    def __init__(self, device: torch.device, *, room: int, into: Tensor | None = None) -> None:
        self._host = torch.empty(room, dtype=torch.uint8, pin_memory=device.type == "cuda")
        super().__init__(self._host.numpy())
        self.device = device
        self.memory = torch.empty(room, dtype=torch.uint8, device=device) if into is None else into
        self.wanted = 0
        self.shapes: Shapes = []
        self.filled_in: list[tuple[Any, Shapes]] = []
        self._others: list[Tensor] = []

    def add(self, *arrays: Array) -> tuple[Tensor, ...]:
        """The arrays as tensors on the device."""
        return tuple(self._add(x) for x in arrays)

    def fill(self, name: Any, shapes: Shapes, fill: Fill) -> tuple[Tensor, ...]:
        """Arrays of int64 that `fill` writes straight into the parcel, as tensors on the device."""
        ends = list(accumulate((_aligned(8 * math.prod(shape)) for shape in shapes), initial=self.filled))
        # Exactly what they take, as `add` counts it: what is put in by `add` has no name to be filled by again.
        if ends[-2] + 8 * math.prod(shapes[-1]) > len(self._flat):
            arrays = [np.empty(shape, np.int64) for shape in shapes]
            fill(arrays)
            return self.add(*arrays)
        self.filled_in.append((name, shapes))
        fill([self.room_for(shape, np.int64) for shape in shapes])
        return tuple(
            self.memory[begin : begin + 8 * math.prod(shape)].view(torch.int64).view(shape)
            for begin, shape in zip(ends, shapes)
        )

    def room_for(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array in the parcel, to be filled; there must be room."""
        begin = self.filled
        self.shapes.append((np.dtype(dtype).itemsize, *shape))
        made = super().room_for(shape, dtype)
        self.wanted += self.filled - begin
        return made

    def _add(self, x: Array) -> Tensor:
        begin, end = self.filled, self.filled + x.nbytes
        if end > len(self._flat):
            self.wanted += _padded(x)
            self.shapes.append((x.itemsize, *x.shape))
            self._others += to_device(x, device=self.device)
            return self._others[-1]
        self.room_for(x.shape, x.dtype)[...] = x
        return self.memory[begin:end].view(_torch_type(x.dtype)).view(x.shape)

    def tensors(self) -> tuple[Tensor, ...]:
        """All memory of the device that it has taken."""
        return self.memory, *self._others

    def send(self) -> None:
        """Copy all of it; only queues."""
        self.memory[: self.filled].copy_(self._host[: self.filled], non_blocking=True)


@cache
def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def to_device(*arrays: npt.NDArray[Any], device: torch.device) -> tuple[Tensor, ...]:
    """The arrays as tensors on the device, in one copy."""
    if device.type == "cpu":
        return tuple(torch.from_numpy(x) for x in arrays)
    packed = pack(arrays, pinned=device.type == "cuda")
    return unpack(packed.to(device, non_blocking=True), arrays)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on its way to the device, by a copy of its own: for what is large, or a tensor already."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Values of any device on the CPU; waits for them, and lets other threads go on meanwhile."""
    return Readback(values).read() if values.is_cuda else values.cpu()


def pack(arrays: tuple[npt.NDArray[Any], ...], *, pinned: bool) -> Tensor:
    """The bytes of all arrays behind each other, each beginning at a multiple of 16."""
    # torch keeps page-locked memory until the copy from it is done, and then for the next call.
    room = torch.empty(sum(_padded(x) for x in arrays), dtype=torch.uint8, pin_memory=pinned)
    flat, begin = room.numpy(), 0
    for x in arrays:
        flat[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)[...] = x
        begin += _padded(x)
    return room


def unpack(packed: Tensor, arrays: tuple[npt.NDArray[Any], ...]) -> tuple[Tensor, ...]:
    """What `pack` put together, as tensors in the shapes of the arrays."""
    found, begin = [], 0
    for x in arrays:
        found.append(packed[begin : begin + x.nbytes].view(_torch_type(x.dtype)).view(x.shape))
        begin += _padded(x)
    return tuple(found)


def _padded(x: npt.NDArray[Any]) -> int:
    return _aligned(x.nbytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
