"""A run that is told to stop (SIGTERM): all ranks save after the same step and end; the same command goes on.

Who is told may be one rank or all, at different moments. So the request travels with the numbers of a step, which are
summed anyway, and every rank hears of it at the same step.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from freescale.comm.world import Ranks
from freescale.errors import Preempted

_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
# A scheduler tells every process and their launcher tells them again: that is one request.
_ONE_REQUEST_S = 2.0
# Before the first step there is nothing to save; a process that waits for others cannot hear of it in time.
_SET_UP_S = 5.0
_NO_MORE = b"\0"


class StopRequest:
    """Whether this rank was told to stop, and after which step all of them do.

    Args:
        requested: whether this rank was.
        last_step: after which step all ranks stop, once they have agreed; None: they go on.
    """

    def __init__(self) -> None:
        self.requested = False
        self.last_step: int | None = None
        self._waits_for_a_step = False

    def wait_for_a_step(self) -> None:
        """From now on there is something to save: a request is met after a step, and no longer where it comes."""
        self._waits_for_a_step = True

    def anywhere(self, ranks: Ranks) -> bool:
        """Whether any rank was told to stop; every rank must ask."""
        return bool(ranks.sum_on_cpu(torch.tensor([float(self.requested)])))

    def hear(self, number: int, frame: object) -> None:
        """In the main thread, as soon as Python runs there again."""
        self.requested = True
        if not self._waits_for_a_step:
            raise Preempted("stopped on request before the first step; the same command starts again")

    def listen(self, ears: socket.socket) -> None:
        """In a thread of its own: a main thread that waits in a library hears nothing."""
        first = None
        while True:
            heard, _, _ = select.select([ears], [], [], 1.0)
            signals = ears.recv(4096) if heard else b""
            if _NO_MORE in signals:
                return
            now = time.monotonic()
            if signal.SIGTERM in signals:
                self.requested = True
                if first is not None and now - first > _ONE_REQUEST_S:
                    os._exit(_ENDED_BY_SIGTERM)
                first = first or now
            if first is not None and now - first > _SET_UP_S and not self._waits_for_a_step:
                os._exit(_ENDED_BY_SIGTERM)


@contextmanager
def stop_on_sigterm(stop: StopRequest) -> Iterator[None]:
    """Inside, SIGTERM is a request to stop, and a second one, seconds later, ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ears, mouth = socket.socketpair()
    mouth.setblocking(False)
    listener = threading.Thread(target=stop.listen, args=(ears,), name="stop requests", daemon=True)
    listener.start()
    handler = signal.signal(signal.SIGTERM, stop.hear)
    wakeup = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, handler)
        mouth.send(_NO_MORE)  # closing it would not do: loader processes hold it, too
        listener.join()
        mouth.close()
        ears.close()
