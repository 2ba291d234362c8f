"""Threads that compute where the thread that starts them does. CUDA lets every new thread begin on the first GPU.

A rank of the second GPU whose thread does not say otherwise launches its kernels on the first one, where its tensors
are not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def same_device() -> Callable[[], None]:
    """What a new thread calls first, to use the GPU of the thread that calls this; nothing where there is none."""
    if not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


def start_thread(work: Callable[..., None], *args: object, name: str | None = None) -> threading.Thread:
    """Do work in a thread on the GPU of this one; the program does not wait for it at its end."""
    use_device = same_device()

    def run() -> None:
        use_device()
        work(*args)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
