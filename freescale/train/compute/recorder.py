"""Records work of a GPU as CUDA graphs: what all recordings of a run share, and the update of the dense part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freescale.kernels.runtime import finish_graph, free_bytes

_MOST_FAILURES = 3
_ROOM = 2.5
"""Recordings compute in memory of their own, and steps as usual in as much beside it; others are a fourth larger."""

_WARM = 2
"""The second update is recorded: the first one makes the optimizer's moments."""


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, *, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """What is started inside is recorded instead; other threads go on as they like."""
    with warnings.catch_warnings():
        # Weights were last used on another stream, which has been waited for.
        warnings.filterwarnings("ignore", message=".*AccumulateGrad node's stream")
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield


class Memory(NamedTuple):
    """Bytes of a GPU: handed out, the most that ever were, and what can still be."""

    allocated: int
    peak: int
    available: int


def memory_of(device: torch.device) -> Memory:
    """As torch sees it now."""
    peak = torch.cuda.max_memory_allocated(device)
    return Memory(torch.cuda.memory_allocated(device), peak, free_bytes(device))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class CutGraph(NamedTuple):
    """A graph, and the number it was cut off with from the one before; None: it is the first."""

    number: int | None
    graph: torch.cuda.CUDAGraph


class _Tape(AbstractContextManager["_Tape"]):
    """Recordings one behind the other, that share their memory: what one leaves, the next one finds."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self.made: list[CutGraph] = []
        self.slow_fills: str | None = None
        """Why memsets stay in a recording."""
        self._running: AbstractContextManager[None] | None = None

    def __enter__(self) -> _Tape:
        self._begin(None)
        return self

    def __exit__(self, *error: Any) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(*error)
            if not any(error):
                self.slow_fills = finish_graph(self.made[-1].graph) or self.slow_fills

    def cut(self, number: int) -> None:
        """What follows belongs to another graph."""
        self.__exit__(None, None, None)
        self._begin(number)

    def _begin(self, number: int | None) -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        running = recording(graph, pool=self._pool, stream=self._stream)
        running.__enter__()
        self._running = running
        self.made.append(CutGraph(number, graph))


class Recorder:
    """What all recordings of a run share: a stream, the memory they compute in, and whom to tell why there is none.

    Args:
        device: a GPU; elsewhere nothing is recorded.
        tell: told once why steps are computed as usual.
        remark: told once why replays take longer than they could.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        tell: Callable[[str], None] = lambda reason: None,
        remark: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self._tell: Callable[[str], None] | None = tell
        self._remark: Callable[[str], None] | None = remark
        self._failures = 0
        self._device, self._had_room = device, -1
        self._available: int | None = None
        self.held_bytes = 0
        """What recordings compute in, which nothing else can."""
        if self._on_gpu:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    @property
    def on(self) -> bool:
        """Whether recordings are made."""
        return self._on_gpu and self._failures < _MOST_FAILURES

    def try_out(
        self, work: Callable[[], None], *, size: int, shrink: Callable[[], bool] = lambda: False
    ) -> bool:
        """Do the work as usual, and find out whether there is room to record it; else nothing is recorded any more.

        Args:
            work: what is to be recorded.
            size: of its batch; what is smaller than one that had room is not asked again.
            shrink: lets the work take less memory, for another try; False where it cannot.
        """
        while True:
            found = self._tried(work, size)
            if found is None:
                return True
            if not shrink():
                break
        self._failures = _MOST_FAILURES
        self.give_up(f"recordings would take too much memory beside the steps ({found})")
        return False

    def _tried(self, work: Callable[[], None], size: int) -> str | None:
        """What was missing; None where there is room."""
        try:
            if size <= self._had_room or not self._on_gpu:
                work()
                return None
            if self._available is None:
                self._available = memory_of(self._device).available
            needed = self._needed(work)
        except RuntimeError as error:
            # Of any library that finds too little memory; what else it may be comes again when the step is computed.
            return _first_line(error)
        if self._available >= _ROOM * needed:
            self._had_room = size
            return None
        return f"{needed / 2**30:.1f} GiB a step, and {self._available / 2**30:.1f} GiB were left"

    def _needed(self, work: Callable[[], None]) -> int:
        """What it takes at its peak."""
        assert self._available is not None
        for again in (False, True):
            if again:  # the peak may be older than this work
                torch.cuda.reset_peak_memory_stats(self._device)
            before = memory_of(self._device).allocated
            work()
            needed = memory_of(self._device).peak - before
            if self._available >= _ROOM * needed:
                break
        return needed

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """A graph of all that `work` starts; None where it cannot be recorded."""
        made = self.record_in_pieces(lambda cut: work())
        return None if made is None else made[0].graph

    def record_in_pieces(self, work: Callable[[Callable[[int], None]], None]) -> list[CutGraph] | None:
        """Graphs of what `work` starts, cut wherever it says so; None where it cannot be recorded."""
        tape = _Tape(self._pool, self._stream)
        before = torch.cuda.memory_reserved(self._device)
        try:
            with tape:
                work(tape.cut)
        except (RuntimeError, ValueError) as error:
            self._failures += 1
            if not self.on:
                self.give_up(f"recording a step failed: {_first_line(error)}")
            return None
        finally:
            self.held_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        if tape.slow_fills is not None and self._remark is not None:
            self._remark(f"small memsets stay in recordings, some microseconds each: {tape.slow_fills}")
            self._remark = None
        return tape.made

    def give_up(self, reason: str) -> None:
        """Tell once why steps, or some of them, are computed as usual."""
        if self._tell is not None:
            self._tell(reason)
            self._tell = None


class RecordedUpdate:
    """The update of the dense part, recorded once and replayed; what it reads must always lie in the same places.

    Args:
        update: scales gradients and moves weights; returns the norm of the gradients, if it was asked for.
        recorder: records it.
    """

    def __init__(self, update: Callable[[], Tensor | None], *, recorder: Recorder) -> None:
        self._update, self._recorder = update, recorder
        self._times = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._norm: Tensor | None = None

    def run(self) -> Tensor | None:
        """The norm before gradients were scaled, if it was asked for."""
        self._times += 1
        if self._graph is None and self._recorder.on and self._times >= _WARM:
            self._graph = self._recorder.record(self._noted)
        if self._graph is None:
            return self._update()
        self._graph.replay()
        return self._norm

    def _noted(self) -> None:
        self._norm = self._update()
