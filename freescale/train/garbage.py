"""Python's garbage collector, kept out of the steps.

With torch and the data loaded, a full collection looks at 400,000 objects and stops the host for 100 to 200 ms. It
comes when a rank has made enough new ones, so on another step of every rank, and each time all others wait. What is
alive before the first step will be at the end: it is set aside, so that a collection sees only what came since.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

WARM_STEPS = 8
"""Kernels, buffers and plans of the first steps stay, too."""


@contextmanager
def short_collections() -> Iterator[None]:
    """Set aside what is there now; given back in the end."""
    set_aside()
    try:
        yield
    finally:
        gc.unfreeze()


def set_aside() -> None:
    """Collect, then let later collections pass over what is left. All ranks do so at the same step."""
    gc.collect()
    gc.freeze()
