"""Python's garbage collector, kept from looking through all that a run has loaded.

A full collection looks at every object of the process. With torch, Triton and numba that takes 150 ms on a fast host,
in which no thread of the rank runs Python. It comes at a step of its own on every rank, and then all others wait. What
is there when training begins stays to the end, so it is set aside; collections look at what came since.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

_LOADED = 8
"""Steps after which kernels, and what they import when they are first called, are there as well."""


class GcFreeze:
    """Inside the block, what was there when it began is not looked at; nor what the first steps loaded."""

    def __init__(self) -> None:
        self._steps = 0

    def __enter__(self) -> Self:
        _set_aside()
        return self

    def step_done(self) -> None:
        """Another step has ended."""
        self._steps += 1
        if self._steps == _LOADED:
            _set_aside()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # All of it, whoever has set it aside: there is no other way, and a run that stayed there would keep its tables
        # for as long as the process lives. Python 3.12 sets some hundred objects aside before anybody asks.
        gc.unfreeze()


def _set_aside() -> None:
    gc.collect()  # what nobody holds on to would be kept for ever
    gc.freeze()
