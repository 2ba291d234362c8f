"""Milliseconds by the GPU's own clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def ms_a_call(call: Callable[[], Any], calls: int) -> float:
    """Of so many in a row, and the GPU is idle afterwards."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(calls):
        call()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / calls
