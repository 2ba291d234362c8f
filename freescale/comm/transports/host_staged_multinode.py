"""host_staged across machines: pinned copies down, an exchange of CPU tensors by one thread, pinned copies up.

Experimental: tested against stand-ins, never run on two machines with GPUs; `auto` does not take it.

    leaving   copy down ──event──┐
    thread                       └> gloo exchange ──flag──┐
    coming    wait for the flag ──────────────────────────┘> copy up ──event──> caller

The GPU's part is queued when the exchange starts: a stream waits for a word in pinned memory, which the thread writes
when the rows are here. No kernel runs, and the training thread waits for nothing.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.comm.rings import EPOCHS, Driver, index_of
from freescale.kernels.runtime import start_thread


@dataclass
class _Job:
    """Rows in pinned memory, once an event has happened; and where those that come belong."""

    down: torch.cuda.Event
    leaving: Tensor
    coming: Tensor
    send: list[int]
    receive: list[int]
    number: int


class _Pending:
    def __init__(
        self, thread: _GlooThread, received: Tensor, events: Sequence[torch.cuda.Event], pinned: object
    ) -> None:
        self._thread, self._received, self._events, self._pinned = thread, received, events, pinned

    def wait(self) -> Tensor:
        """Let the current stream wait until everything has left and arrived."""
        self._thread.check()
        stream = torch.cuda.current_stream(self._received.device)
        for event in self._events:
            stream.wait_event(event)
        self._received.record_stream(stream)
        return self._received


class _GlooThread:
    """The thread and what it shares with the transport."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        self._control = control
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.arrived = torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        self._failure: Exception | None = None

    def check(self) -> None:
        """Raise what has gone wrong, if something has."""
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        """Exchange job by job; after a failure let the streams run free, and the next call raises it."""
        while (job := self.jobs.get()) is not None:
            try:
                if self._failure is None:
                    job.down.synchronize()
                    dist.all_to_all_single(
                        job.coming, job.leaving, job.receive, job.send, group=self._control
                    )
            except Exception as error:
                self._failure = error
            signed = (job.number + EPOCHS // 2) % EPOCHS - EPOCHS // 2
            self.arrived[0] = signed


class MultinodeStagedTransport:
    """Uneven all-to-all of GPU ranks on several machines.

    Args:
        control: a CPU group of these ranks that nothing else uses.
        driver: queues the waits.
        device: the GPU.
    """

    name = "host_staged"
    engine = "copy engines to and from pinned memory, gloo between machines"
    sm_free = True
    reason = (
        "experimental: between machines it has never run on real GPUs; pinned copies run beside the SMs, and a thread "
        "of the CPU sends the rows"
    )

    def __init__(self, control: dist.ProcessGroup, *, driver: Driver, device: torch.device) -> None:
        self.num_ranks, self.rank = dist.get_world_size(control), dist.get_rank(control)
        self._driver, self._device = driver, device
        self._thread = _GlooThread(control)
        self._leaving, self._coming = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._num_started = 0
        start_thread(self._thread.run, name="gloo exchange")
        weakref.finalize(self, self._thread.jobs.put, None)

    def start(self, tensor: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> _Pending:
        """Queue the copies; the thread does the rest."""
        self._thread.check()
        self._driver.use(index_of(self._device))
        tensor = tensor.detach().contiguous()
        received = tensor.new_empty(sum(receive), *tensor.shape[1:])
        leaving = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        coming = torch.empty_like(received, device="cpu", pin_memory=tensor.is_cuda)
        self._num_started = (self._num_started + 1) % EPOCHS
        now = torch.cuda.current_stream(self._device)
        for stream in (self._leaving, self._coming):
            stream.wait_stream(now)
        with torch.cuda.stream(self._leaving):
            leaving.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._leaving)
        down = self._leaving.record_event()
        self._thread.jobs.put(_Job(down, leaving, coming, list(send), list(receive), self._num_started))
        word = (self._thread.arrived.data_ptr(), self._num_started)
        self._driver.flags(self._coming.cuda_stream, wait=[word])
        with torch.cuda.stream(self._coming):
            received.copy_(coming, non_blocking=True)
        received.record_stream(self._coming)
        events = (down, self._coming.record_event())
        return _Pending(self._thread, received, events, (leaving, coming))
