"""Numbers that a step leaves on its device: sent to the host as they are made, read when they have long arrived.

Asking a GPU for a loss (`.item()`) waits until everything queued before it is done, and the GPU then stands idle until
the host has queued something new. So the host copies it into pinned memory and looks at it one step later.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from freescale.kernels.runtime.cuda_streams import current_stream


class Readback:
    """Values on their way to the host.

    Args:
        values: of any device.
        beside: a stream that copies them. Where rows travel by way of the host, copies queue up at the engine that
            makes them, and a stream that computes would stand still for as long. Values may be overwritten meanwhile.
    """

    def __init__(self, values: Tensor, *, beside: torch.cuda.Stream | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values.detach()
        if values.is_cuda:
            found = self._values
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            if beside is not None:
                found = found * 1  # by a kernel: a copy might queue up, too
                beside.wait_stream(current_stream(values.device))
                found.record_stream(beside)
            with nullcontext() if beside is None else torch.cuda.stream(beside):
                self._values.copy_(found, non_blocking=True)
                self._event = current_stream(values.device).record_event()

    @property
    def here(self) -> bool:
        """Whether `read` would not wait."""
        event = self._event
        return event is None or event.query()

    def read(self) -> Tensor:
        """The values, on the CPU; waits for them if need be."""
        event = self._event
        if event is not None:
            event.synchronize()
            self._event = None
        return self._values
