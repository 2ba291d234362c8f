"""The order in which a rank's transfers leave: by deadline, in chunks, so that nothing urgent waits behind bulk.

    OL gradients > OL rows > dense gradients > NOL rows > NOL gradients > ids        (Deadline, most urgent first)

The first three are urgent: the rank stands still until they are through, so the thread that needs them moves them
itself. The others are bulk: they have the time of a whole forward and backward, so a communication thread moves them.

    training thread   ──OL grads──OL rows────────── forward, backward ─────dense──OL grads──OL rows──
                          ^ gate shut ^                                  ^  gate shut   ^
    this queue        ─────         ─────[NOL grads][NOL rows][NOL rows][ids]──           ──────────
                                          one chunk at a time, each through the gate

Ranks must start the transfers of one connection in the same order. So every channel is a connection of its own, and its
order is the order in which the schedule submits: the same program on every rank, never the timing of one of them. Only
between channels is the choice local. It cannot block: the gate holds a chunk up for a bounded time, then lets it pass.

A GPU is given its transfers long before they run, so there the gate lets streams wait: bulk behind the moment at which
all urgent traffic is through that was queued before it (`queued`, `hold`). Nobody waits for what is queued later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from freescale import trace
from freescale.comm import Transport
from freescale.kernels.runtime import start_thread

T = TypeVar("T")

# Chunks of one transfer under way at a time: the second fills the link while the first is waited for.
_WINDOW = 2


class Deadline(IntEnum):
    """What a transfer is, in the order in which its bytes are needed."""

    OL_GRADIENTS = 0
    OL_ROWS = 1
    DENSE_GRADIENTS = 2
    NOL_ROWS = 3
    NOL_GRADIENTS = 4
    IDS = 5

    @property
    def urgent(self) -> bool:
        """Whether a rank stands still until it is through."""
        return self <= Deadline.DENSE_GRADIENTS


class Gate:
    """Lets traffic through when nothing more urgent is under way, or when it has waited for long enough.

    Args:
        fairness_s: the longest a chunk is held up.
    """

    def __init__(self, *, fairness_s: float = 0.02) -> None:
        self._fairness_s = fairness_s
        self._changed = threading.Condition()
        self._under_way = dict.fromkeys(Deadline, 0)
        self._moments: dict[Deadline, torch.cuda.Event] = {}

    @contextmanager
    def urgent(self, deadline: Deadline) -> Iterator[None]:
        """Traffic with this deadline is under way inside."""
        self.shut(deadline)
        try:
            yield
        finally:
            self.open(deadline)

    def shut(self, deadline: Deadline) -> None:
        """Traffic begins that everything less urgent has to wait for; may be called again before `open`."""
        with self._changed:
            self._under_way[deadline] += 1

    def open(self, deadline: Deadline) -> None:
        """As much of it has ended."""
        with self._changed:
            self._under_way[deadline] -= 1
            self._changed.notify_all()

    def wait(self, deadline: Deadline) -> None:
        """Go through when nothing more urgent is under way, or after having been held up for long enough."""
        with self._changed:
            if self._is_free(deadline):
                return
            start = trace.mark(on_device=False)
            self._changed.wait_for(lambda: self._is_free(deadline), timeout=self._fairness_s)
            trace.add("let urgent traffic pass", kind="wait", start=start, end=trace.mark(on_device=False))

    def queued(self, deadline: Deadline, moment: torch.cuda.Event) -> None:
        """Traffic with this deadline was given to a stream of a GPU, and is through at this moment."""
        self._moments[deadline] = moment

    def hold(self, deadline: Deadline, stream: torch.cuda.Stream) -> None:
        """Let a stream that is about to be given such traffic wait for more urgent one that was queued before."""
        for other, moment in self._moments.items():
            if other < deadline:
                stream.wait_event(moment)

    def _is_free(self, deadline: Deadline) -> bool:
        return not any(self._under_way[other] for other in Deadline if other < deadline)


@dataclass(frozen=True)
class Channels:
    """The connections of a rank. Each carries its transfers in the order the schedule starts them.

    Args:
        express: urgent rows and gradients, started by the training thread.
        bulk: rows and gradients that have time.
        ids: ids and masks, which live on the CPU; on CPU ranks the same connection as `bulk`.
        inside: where rows travel once a node, those between the ranks of this one; the others are between nodes then.
    """

    express: Transport
    bulk: Transport
    ids: Transport
    inside: Channels | None = None


class Ticket(Generic[T]):
    """A job handed to the queue."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job: Callable[[], T] | None = job
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._submitted = trace.have_ready()
        self._finished: trace.Arrival | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._done.is_set()

    def wait(self) -> T:
        """The job's result once it is done; its error, or that of the job that broke the queue."""
        start = trace.mark(on_device=False)
        self._done.wait()
        trace.took_over(self._finished, start)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def run(self, *, idle_since: trace.Mark = None) -> None:
        """Do the job, in a thread that has had nothing to do since then."""
        assert self._job is not None
        trace.took_over(self._submitted, idle_since)
        try:
            self._result = self._job()
        finally:
            self._job = None  # what it holds on to (gradients, rows) is free again
        self._finished = trace.have_ready()
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """The job will never be done."""
        self._error = error
        self._job = None
        self._done.set()


class TrafficQueue:
    """Runs the bulk jobs of a rank in a thread of its own, in the order they are submitted.

    A job that fails cancels all that follow: their tickets and every later call raise its error. So a rank whose
    communication has broken ends at its next move instead of waiting for something that will not come.

    Args:
        chunk_bytes: bulk travels in pieces of about this size; the most an urgent transfer waits for is two of them.
        gate: shared with others whose traffic is urgent, such as dense gradients.
        name: of the thread.
    """

    at_once = False
    """Jobs are done later, by another thread."""

    def __init__(
        self, *, chunk_bytes: int = 1 << 20, gate: Gate | None = None, name: str = "communication"
    ) -> None:
        self.gate = gate or Gate()
        self.chunk_bytes = chunk_bytes
        self._jobs: deque[Ticket[Any]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = start_thread(self._work, name=name)

    def submit(self, job: Callable[[], T]) -> Ticket[T]:
        """Run a job after all that were submitted before it."""
        ticket = Ticket(job)
        with self._changed:
            self.check()  # under the lock: nobody would take a job that comes after the failure
            self._jobs.append(ticket)
            self._changed.notify()
        return ticket

    def check(self) -> None:
        """Raise the error that broke the queue, if one did."""
        if self._failure is not None:
            raise self._failure

    def cancel(self, error: BaseException) -> None:
        """Let every job that has not begun fail with this error, and take no more."""
        with self._changed:
            self._failure = self._failure or error
            while self._jobs:
                self._jobs.popleft().fail(self._failure)

    def close(self) -> None:
        """Finish what was submitted and end the thread; after a failure nothing is waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._failure is None:
            self._thread.join()

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
        """Move bulk in chunks, each through the gate; called from a job.

        Args:
            transport: the channel.
            tensor: as for `Transport.start`.
            deadline: what it is.
            send: rows to every rank.
            receive: rows from every rank.
            largest: a bound on the rows any rank sends to any other, the same number on every rank: the number of
                chunks follows from it, and a collective must be called equally often everywhere.
        """
        row_bytes = max(1, tensor.shape[1:].numel() * tensor.itemsize)
        step = max(1, self.chunk_bytes // (row_bytes * transport.num_ranks))
        if largest <= step:
            self.gate.wait(deadline)
            return transport.start(tensor, send=send, receive=receive).wait()
        received = tensor.new_empty(sum(receive), *tensor.shape[1:])
        flying: deque[tuple[Any, Tensor]] = deque()
        for first in range(0, largest, step):
            self.gate.wait(deadline)
            leaving, sizes = _chunk(send, first, step)
            places, coming = _chunk(receive, first, step)
            flying.append(
                (transport.start(tensor.index_select(0, leaving), send=sizes, receive=coming), places)
            )
            if len(flying) == _WINDOW:
                _land(received, *flying.popleft())
        while flying:
            _land(received, *flying.popleft())
        return received

    def _work(self) -> None:
        while True:
            idle_since = trace.mark(on_device=False)
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                ticket = self._jobs.popleft()
            try:
                ticket.run(idle_since=idle_since)
            except BaseException as error:
                self.cancel(error)
                ticket.fail(error)
                return


def _chunk(counts: Sequence[int], first: int, step: int) -> tuple[Tensor, list[int]]:
    """Rows first .. first + step - 1 of every rank's block: where they stand, and how many of each."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    pieces = [range(min(first, count), min(first + step, count)) for count in counts]
    places = [torch.arange(start + piece.start, start + piece.stop) for start, piece in zip(starts, pieces)]
    return torch.cat(places), [len(piece) for piece in pieces]


def _land(received: Tensor, pending: Any, places: Tensor) -> None:
    received.index_copy_(0, places, pending.wait())
