"""Padded batches made ready by processes of their own: planned, read, mapped to rows, written as they will travel.

A thread that makes batches ready shares the interpreter with the one that trains: each waits for the other where a step
takes a millisecond or two. Where a batch is replayed all that is left to do for it is to bring its bytes to the device.
So processes write parcels into memory that they share with the rank:

    loader process k    plan n ┃ read ┃ unique rows ┃ write parcel n into a free place ┃ plan n+K ...
    thread ahead                                         copy n to pinned memory, place free again ┃ send n to the GPU

Steps are dealt out to the processes in turn, and taken in order. A size that is not replayed (yet) comes as it is, and
is padded by the thread. Maps that learn ids are asked in the rank itself, and have no such processes.
"""

from __future__ import annotations

import mmap
import multiprocessing
import pickle
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.balance import BalancedSampler, StepPlan
from freescale.data import Examples, SequenceBatch
from freescale.errors import FreeScaleError, TrainingError
from freescale.kernels.runtime import HostRoom
from freescale.pipeline.ids.row_finder import RowFinder
from freescale.pipeline.loading.loader import (
    forks_without_collections,
    leave_to_the_rank,
    live_as_long_as_the_rank,
)
from freescale.pipeline.padding.padded_batch import PaddedBatch, rows_in_parcel
from freescale.pipeline.padding.padder import Padder
from freescale.pipeline.padding.source import PaddingSource, Template

_PLACES = 2
"""Parcels of a process that wait to be taken."""

_PLACE_BYTES = 1 << 26
"""Of one place; only what is written takes memory. Larger parcels are padded in the rank."""


class LoadedParcel(NamedTuple):
    """A batch on its way to the device, and what the host keeps of it.

    Args:
        plan: what the whole step consists of.
        batch: where its sequences stand and which histories they are, on the CPU.
        padded: all that the model reads.
        rows: by table, [U] the numbers of its unique rows, on the CPU.
    """

    plan: StepPlan
    batch: SequenceBatch
    padded: PaddedBatch
    rows: dict[str, Tensor]


@dataclass(frozen=True)
class ParcelMaker:
    """Step number -> what a parcel is made of. A pure function, so that any process can make any step.

    Args:
        sampler: plans steps.
        examples: reads them.
        finder: finds their rows; its maps are formulas.
        padder: knows sizes.
    """

    sampler: BalancedSampler
    examples: Examples
    finder: RowFinder
    padder: Padder

    def make(self, step: int) -> tuple[StepPlan, SequenceBatch, PaddingSource]:
        """Plan, read and map one step."""
        plan = self.sampler.plan(step)
        batch = self.examples.batch(plan.rows, step=step)
        found = self.finder.find(batch, step=step)
        return plan, batch, self.padder.source(*found, global_tokens=plan.divisor, step=step)


class _Written(NamedTuple):
    """What a process says of a step.

    Args:
        place: where its parcel stands, or would; free once the rank has told so.
        plan: of the step.
        offsets: where its sequences stand.
        histories: which ones they are.
        num_rows: by table, places for rows in the parcel.
        real_rows: by table, unique rows.
        template: number of the one that the parcel was written by; None: there is no parcel.
        source: what the parcel is to be made of, where there is none.
    """

    place: int
    plan: StepPlan
    offsets: np.ndarray[Any, Any]
    histories: np.ndarray[Any, Any]
    num_rows: Mapping[str, int]
    real_rows: Mapping[str, int]
    template: int | None
    source: PaddingSource | None


class ParcelLoader:
    """Parcels in step order. Close it at the end: its processes end with it.

    Args:
        maker: makes steps.
        first_step: number of the first one.
        num_steps: how many follow each other.
        workers: processes.
    """

    def __init__(self, maker: ParcelMaker, *, first_step: int, num_steps: int, workers: int) -> None:
        self._padder = maker.padder
        self._next, self._end = first_step, first_step + num_steps
        self._templates: list[Template] = []
        self._numbers: _Numbered = {}
        self._workers: list[_Worker] = []
        with forks_without_collections():
            for number in range(workers):
                steps = range(first_step + number, self._end, workers)
                self._workers.append(_Worker(partial(_serve, maker=maker, steps=steps)))
        self._first = first_step

    def next(self) -> LoadedParcel | None:
        """The next batch, on its way to the device; None at the end."""
        if self._next == self._end:
            return None
        worker = self._workers[(self._next - self._first) % len(self._workers)]
        told = worker.receive()
        if isinstance(told, FreeScaleError):
            raise told
        self._next += 1
        if told.template is None:
            assert told.source is not None
            padded = self._padder.pad_source(told.source)
            rows = {name: torch.from_numpy(each) for name, each in told.source.unique.items()}
        else:
            content, sizes = worker.places[told.place], (told.num_rows, told.real_rows)
            padded = self._padder.written(
                content, self._templates[told.template], num_rows=sizes[0], real_rows=sizes[1]
            )
            # A copy: the place is written again soon.
            rows = {name: each.clone() for name, each in rows_in_parcel(content, *sizes).items()}
        worker.free(told.place, self._numbered())
        histories = {"row": torch.from_numpy(told.histories)}
        batch = SequenceBatch(torch.from_numpy(told.offsets), {}, histories)
        return LoadedParcel(told.plan, batch, padded, rows)

    def _numbered(self) -> _Numbered:
        """By size, the template of batches that are replayed, with a number that it never shares."""
        for size, template in self._padder.templates().items():
            if size not in self._numbers or self._numbers[size][1] is not template:
                self._numbers[size] = (len(self._templates), template)
                self._templates.append(template)
        return self._numbers

    def close(self) -> None:
        """No batch follows."""
        for worker in self._workers:
            worker.close()


_Numbered = dict[tuple[Any, ...], tuple[int, Template]]


class _Worker:
    """A process, the memory it writes into, and a pipe to it."""

    def __init__(self, serve: Callable[[_Worker], None]) -> None:
        room = torch.frombuffer(mmap.mmap(-1, _PLACES * _PLACE_BYTES), dtype=torch.uint8)
        self.places = room.view(_PLACES, _PLACE_BYTES)
        self._told: _Numbered = {}
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._run, args=(serve, theirs), daemon=True)
        self._process.start()
        theirs.close()
        weakref.finalize(self, self._process.kill)

    def _run(self, serve: Callable[[_Worker], None], pipe: Connection) -> None:
        leave_to_the_rank()
        live_as_long_as_the_rank(0)
        torch.set_num_threads(1)  # threads of the rank have not come along
        self.pipe.close()
        self.pipe = pipe
        try:
            serve(self)
            while True:  # until the rank closes it; what is left unread would take what was sent with it
                self.pipe.recv_bytes()
        except (EOFError, OSError, KeyboardInterrupt):
            return

    def receive(self) -> _Written | FreeScaleError:
        """What the process says of its next step; waits for it."""
        try:
            told = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise TrainingError(
                "a process that loads batches has ended",
                got=f"pid {self._process.pid}",
                next_step="see whether the machine ran out of memory; data.workers=0 loads in the rank itself",
            ) from None
        if isinstance(told, str):
            raise RuntimeError(f"a process that loads batches has failed:\n{told}")
        assert isinstance(told, _Written | FreeScaleError)
        return told

    def free(self, place: int, templates: _Numbered) -> None:
        """A place may be written again; the process is told of templates it does not know."""
        told = self._told
        new = {size: each for size, each in templates.items() if told.get(size) is not each}
        self._told.update(new)
        try:
            self.pipe.send_bytes(pickle.dumps((place, new)))
        except OSError:
            return  # it has made its last step and ended; if it has not, `receive` tells

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(worker: _Worker, maker: ParcelMaker, steps: Sequence[int]) -> None:
    """In a loader process: make its steps, never more of them ahead than there are places."""
    free = deque(range(_PLACES))
    templates: _Numbered = {}
    for step in steps:
        while not free or worker.pipe.poll():
            place, new = pickle.loads(worker.pipe.recv_bytes())
            free.append(place)
            templates.update(new)
        told: Any
        try:
            told = _write(worker, maker, step, free.popleft(), templates)
        except FreeScaleError as error:
            told = error
        except Exception:
            told = traceback.format_exc()
        worker.pipe.send_bytes(pickle.dumps(told, protocol=pickle.HIGHEST_PROTOCOL))


def _write(worker: _Worker, maker: ParcelMaker, step: int, place: int, templates: _Numbered) -> _Written:
    plan, batch, source = maker.make(step)
    number, template = templates.get(source.size, (None, None))
    if template is not None and template.num_bytes <= _PLACE_BYTES:
        template.write(source, HostRoom(worker.places[place].numpy()))
    else:
        number = None
    return _Written(
        place=place,
        plan=plan,
        offsets=batch.offsets.numpy(),
        histories=batch.samples["row"].numpy(),
        num_rows=source.num_rows,
        real_rows={name: len(rows) for name, rows in source.unique.items()},
        template=number,
        source=source if number is None else None,
    )
