"""Small tables planned on the CPU, on their way to a GPU."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def on_device(planned: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """The same numbers on `device`, without waiting for what is queued there.

    A copy from ordinary memory may hold the CPU up until the GPU has come so far; one from pinned memory never does.
    """
    values = planned if isinstance(planned, Tensor) else torch.from_numpy(planned)
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
