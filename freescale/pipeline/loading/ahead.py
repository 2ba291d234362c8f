"""Batches made ready ahead of their compute by a thread: all that follows from ids alone, before anybody asks for it.

One rank has no traffic to hide, but its host has work that the device need not wait for:

    training thread   gather rows n ┃ forward n ┃ backward n ┃ update n ┃ gather rows n+1 ┃ forward n+1 ┃ ...
    this thread       load n+2, ids to rows, unique rows, copies   ┃     load n+3, ...
    its stream        ┄┄ behind update n-1 ┄┄ copies n+2 ──────────────> waited for by the stream that gathers rows n+2

Values of rows are read by the training thread alone, after the update of the batch before: so nothing is different but
the time. A map that learns ids is asked in step order by one thread, as it would be in turn. It gives fresh values to
rows that change owner while earlier batches still compute; its guard keeps the rows of AHEAD batches out of that, and
the stream of this thread begins behind the last update that was queued when the batch was asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from freescale.kernels.runtime import same_device
from freescale.pipeline.streams import CopyStream, moment_here, wait_for
from freescale.trace import stage

T = TypeVar("T")

AHEAD = 2
"""Batches made ready while one computes; a map that learns ids must guard the rows of as many."""


class ReadAhead(Generic[T]):
    """The items of an iterator, the next one read by a thread while the last one is worked on.

    Close it at the end, also after an error. An error of the iterator is raised where its item is asked for.

    Args:
        items: asked by one thread, in order.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead-reader", initializer=same_device())
        self._coming: Future[T | None] | None = None

    def next(self) -> T | None:
        """The next item; None at the end."""
        asked = self._coming or self._thread.submit(next, self._items, None)
        item = asked.result()
        self._coming = None if item is None else self._thread.submit(next, self._items, None)
        return item

    def wait_until_idle(self) -> None:
        """Wait until the thread has nothing to do."""
        if (coming := self._coming) is not None:
            wait([coming])

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, eq=False)
class _Made(Generic[T]):
    """A batch, and the moment from which the GPU has it; no batch: the data has ended."""

    batch: T | None
    there: torch.cuda.Event | None


class Ahead(Generic[T]):
    """Iterates over batches that a thread makes ready, at most AHEAD of them before they are asked for.

    An error of the thread is raised where its batch is asked for, and no later batch is made. Take a batch only when
    all work with the one before has been queued. Close it at the end, also after an error: the thread ends with it.

    Args:
        prepare: makes the next batch, None where there is none; called in order, by one thread, on a stream of its own.
        device: where the model computes.
        first_step: number of the first batch.
        look_past: step -> whether later batches may be made before the work with this one is queued. A map that
            changes as ids come in says no where its state is to be saved.
    """

    def __init__(
        self,
        prepare: Callable[[], T | None],
        *,
        device: torch.device,
        first_step: int = 0,
        look_past: Callable[[int], bool] = lambda step: True,
    ) -> None:
        self._prepare = prepare
        self._device = device
        self._look_past = look_past
        self._next_step = first_step
        self._over = False
        self._copies = CopyStream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead", initializer=same_device())
        self._coming: deque[Future[_Made[T]]] = deque()

    def __iter__(self) -> Iterator[T]:
        """The batches; their tensors may be used on the current stream."""
        while True:
            if not self._coming:
                self._ask_for_next()
            asked = self._coming.popleft()
            while len(self._coming) < AHEAD and self._look_past(self._next_step - 1):
                self._ask_for_next()
            made = asked.result()
            if made.batch is None:
                return
            wait_for(made.there)
            yield made.batch

    def wait_until_idle(self) -> None:
        """Wait until the thread has nothing to do: it reads the data set, which others want to read."""
        wait(self._coming)

    def close(self) -> None:
        """Let go of batches that nobody will take, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._coming.clear()
        wait_for(self._copies.there())

    def _ask_for_next(self) -> None:
        self._coming.append(self._thread.submit(self._make, self._next_step, moment_here(self._device)))
        self._next_step += 1

    def _make(self, step: int, behind: torch.cuda.Event | None) -> _Made[T]:
        """In the thread: one batch. After the last one, or a broken one, there is no other."""
        if self._over:
            return _Made(None, None)
        self._over = True
        with self._copies.copies(), stage("prepare a batch ahead", step=step + 1):
            wait_for(behind)
            batch = self._prepare()
        self._over = batch is None
        return _Made(batch, self._copies.there())
