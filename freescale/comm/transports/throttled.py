"""A slower link than the machine has, for measuring: what would this step cost over so many GB/s?

The bytes really travel, over another transport. On top, a transfer takes the time it would take on the emulated link:
its place in the line, its bytes divided by the speed, and the latency. The wait for it is sleep, so a busy machine
disturbs it little.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from torch import Tensor

from freescale.comm import Pending, Transport


class Link:
    """The way from one rank to all others; first come, first served, for all channels together.

    Args:
        gb_per_s: bytes a second and direction, in 10^9.
        latency_us: from the last byte's departure to its arrival.
    """

    def __init__(self, *, gb_per_s: float, latency_us: float) -> None:
        self._seconds_per_byte = 1e-9 / gb_per_s
        self._latency_s = 1e-6 * latency_us
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, num_bytes: int) -> float:
        """Queue bytes; the moment they have arrived."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes * self._seconds_per_byte
            return self._free_at + self._latency_s


class _Throttled:
    def __init__(self, pending: Pending, arrives_at: float) -> None:
        self._pending, self._arrives_at = pending, arrives_at

    def wait(self) -> Tensor:
        received = self._pending.wait()
        time.sleep(max(0.0, self._arrives_at - time.monotonic()))
        return received


class ThrottledTransport:
    """Another transport behind a link.

    Args:
        inner: moves the bytes.
        link: says how long that takes; shared by all channels of a rank.
    """

    def __init__(self, inner: Transport, link: Link) -> None:
        self._inner, self._link = inner, link
        self.name = inner.name
        self.num_ranks, self.rank = inner.num_ranks, inner.rank
        self.engine, self.sm_free = inner.engine, inner.sm_free
        self.reason = f"{inner.reason}; slowed down to an emulated link"

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """Begin to send; the bytes take their place in the line now."""
        pending = self._inner.start(tensor, send=send, receive=receive)
        rows = max(sum(send) - send[self.rank], sum(receive) - receive[self.rank])
        return _Throttled(pending, self._link.take(rows * tensor.shape[1:].numel() * tensor.itemsize))
