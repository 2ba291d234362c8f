"""Where the stages beside the model run: a thread of a CPU rank, a CUDA stream of a GPU rank.

Both take jobs in the order of the schedule and give tickets to wait for. A thread does a job when it comes to it. A
stream is given its work at once, by the training thread: with NCCL the order of the calls must be the same on every
rank, and one thread has one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from freescale.comm import Transport
from freescale.comm.traffic import Deadline, Gate, TrafficQueue
from freescale.kernels.runtime import current_stream

T = TypeVar("T")


class Waitable(Protocol[T]):  # type: ignore[misc]
    """A job on its way."""

    def wait(self) -> T:
        """Its result, once the work that follows may use it."""


class BackgroundExecutor(Protocol):
    """A place beside the training thread.

    Args:
        at_once: whether `submit` does a job itself, in the calling thread.
    """

    at_once: bool

    def submit(self, job: Callable[[], T]) -> Waitable[T]:
        """Do a job after those submitted before."""

    def send(
        self,
        transport: Transport,
        tensor: Tensor,
        *,
        deadline: Deadline,
        send: Sequence[int],
        receive: Sequence[int],
        largest: int,
    ) -> Tensor:
        """Move bulk from inside a job."""


class _Recorded:
    """Work given to a stream; `wait` lets the current stream, not the CPU, wait for it."""

    def __init__(self, result: object, event: torch.cuda.Event) -> None:
        self._result, self._event = result, event

    def wait(self) -> object:
        current_stream().wait_event(self._event)
        return self._result


class SideStream:
    """Jobs on a CUDA stream of their own, issued at once by the calling thread.

    Args:
        device: the GPU.
        gate: lets jobs that have time wait for urgent traffic.
        urgent: somebody is about to wait for the jobs. Otherwise their copies and small kernels fill gaps, they do
            not make them.
    """

    at_once = True

    def __init__(self, device: torch.device, *, gate: Gate, urgent: bool = False) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)
        self._gate, self._urgent = gate, urgent

    def submit(self, job: Callable[[], T]) -> Waitable[T]:
        """Issue a job behind what the current stream has been given so far."""
        self._stream.wait_stream(current_stream())
        if not self._urgent:
            self._gate.hold(Deadline.NOL_ROWS, self._stream)
        with torch.cuda.stream(self._stream):
            result, done = job(), self._stream.record_event()
        if self._urgent:
            self._gate.queued(Deadline.OL_ROWS, done)
        return _Recorded(result, done)  # type: ignore[return-value]

    def send(
        self,
        transport: Transport,
        tensor: Tensor,
        *,
        deadline: Deadline,
        send: Sequence[int],
        receive: Sequence[int],
        largest: int,
    ) -> Tensor:
        """In one piece: links are shared by the hardware, and chunks would only add launches."""
        return transport.start(tensor, send=send, receive=receive).wait()


def make_side(queue: TrafficQueue, device: torch.device, *, urgent: bool = False) -> BackgroundExecutor:
    """The place for rows and gradients that have time; or that are urgent, beside a rank that does not wait yet."""
    return SideStream(device, gate=queue.gate, urgent=urgent) if device.type == "cuda" else queue


class CopyStream:
    """A CUDA stream for copies to a GPU by another thread; on a CPU nothing is copied.

    On the stream that computes they would stand behind all that is queued there, and whoever waits for them with it.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Copies of this block go there."""
        with torch.cuda.stream(self._stream):
            yield

    def there(self) -> torch.cuda.Event | None:
        """The moment at which all copies so far have arrived; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()


def moment_here(device: torch.device) -> torch.cuda.Event | None:
    """The moment at which all that the current stream has been given so far is done; None on a CPU."""
    return current_stream(device).record_event() if device.type == "cuda" else None


def wait_for(event: torch.cuda.Event | None) -> None:
    """Let the current stream wait for copies of another thread."""
    if event is not None:
        current_stream().wait_event(event)


def record_stream(tensor: Tensor) -> Tensor:
    """A tensor made on another stream: its memory is kept until this stream has used it, too."""
    if tensor.is_cuda:
        tensor.record_stream(current_stream())
    return tensor
