"""What the driver says of a GPU: the share of the last moments in which any kernel ran. A cross-check, not a measure.

NVML counts kernels of all processes, also those that only spin until another rank comes, over windows of a sixth of a
second to a second. So it can be held against the accounts of many steps, not of one, and only where it has looked at
nothing but steps: a run that is evaluated every second is never compared.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

EVERY_S = 1.0
"""The driver's own window is at most so long; asking more often tells nothing new."""

FEWEST, TOLERANCE = 5, 0.1


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


Reader = Callable[[], float]
"""Gives the share of the driver's last window in which a kernel ran."""


class DriverCounter:
    """Asks the driver now and then how busy a device was.

    Args:
        open_reader: called once, when it is first needed; gives what asks the driver, or why that cannot be.
        say: told once that the driver cannot be asked, or that it contradicts the accounts.
        clock: seconds.
    """

    def __init__(
        self,
        open_reader: Callable[[], Reader | str],
        *,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open, self._say, self._clock = open_reader, say, clock
        self._read: Reader | None = None
        self._sum, self._count = 0.0, 0
        self._looked = self._began = clock()
        self._is_over = self._told = False

    def begin(self) -> None:
        """Steps begin, or go on after something else: what the device did before is in no account."""
        self._began = self._clock()

    def look(self) -> None:
        """Ask, where the last answer is old enough, and all that it tells of are steps."""
        now = self._clock()
        # What it tells is of the last window that is over, which may have begun two windows ago.
        if self._is_over or now - self._looked < EVERY_S or now - self._began < 2 * EVERY_S:
            return
        self._looked = now
        if self._read is None:
            found = self._open()
            if isinstance(found, str):
                self._is_over = True
                self._say(f"busy time of the GPU is not checked against the driver's: {found}")
                return
            self._read = found
        self._sum, self._count = self._sum + self._read(), self._count + 1

    def compare(self, *, compute: float, host: float) -> None:
        """Say once where the accounts (shares of the time) and the driver cannot both be right."""
        text = self.contradiction(compute=compute, host=host)
        if text and not self._told:
            self._told = True
            self._say(text)

    @property
    def busy(self) -> float | None:
        """The mean share of the time in which a kernel ran; None before the first answer."""
        return self._sum / self._count if self._count else None

    def contradiction(self, *, compute: float, host: float) -> str:
        """One sentence where the accounts (shares of the time) and the driver cannot both be right."""
        busy = self.busy
        # Kernels that wait for other ranks are busy to the driver and a bubble to the accounts.
        if busy is None or self._count < FEWEST or compute - TOLERANCE <= busy <= 1 - host + TOLERANCE:
            return ""
        return (
            f"the driver saw the GPU busy for {busy:.0%} of the time, the accounts say {compute:.0%} compute and "
            f"{host:.0%} host: other programs use it, or its busy time was measured on unlike steps"
        )


def open_nvml(device: torch.device) -> Reader | str:
    """What asks the driver about a device, or why it cannot be asked."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return f"NVML is not installed ({error})"
    if library.nvmlInit_v2():
        return "NVML does not start"
    handle, found = ctypes.c_void_p(), _Utilization()
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return f"NVML does not know {name}"
    if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found)):
        return "NVML does not tell how busy this device is"

    def read() -> float:
        library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found))
        return found.gpu / 100

    return read
