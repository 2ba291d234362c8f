"""PaddedCompute: forward and backward of padded batches, recorded as CUDA graphs and replayed.

A step of a small model is a few hundred kernels of some microseconds each; to start them takes the host ten times as
long as the GPU needs to run them. Recorded, they are started by one call. A recording has fixed sizes and addresses, so

    batches     are padded to a few sizes (`pipeline/padding/`); those that are foreseen are recorded together, when
                the first of them comes, others when they are met again
    what a batch brings    is copied over what the recording reads: features and lists by one copy, rows by another
    what it leaves         lies in the same place after every step: loss, gradients of weights, gradients of rows

Computed as usual or replayed, the same kernels run on the same sizes: the results are the same to the bit. Where a
batch cannot be recorded it is computed as usual, and the reason is told once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from freescale.data import SequenceBatch
from freescale.embedding import EmbeddingTable, as_compute
from freescale.pipeline import MOST_SIZES, TABLE, PaddedBatch, PaddedViews
from freescale.train.compute.late_update import LateUpdate
from freescale.train.compute.postponed_pieces import DensePiece, PostponedPieces
from freescale.train.compute.recorder import CutGraph, Recorder
from freescale.train.compute.row_room import RowRoom, Rows

VectorsOf = Callable[[Rows, SequenceBatch], tuple[Tensor, Rows]]
"""Item vectors of a batch from the unique rows of all tables, and the rows that its tokens read beside them."""

RECORD_AT = 2
"""How often a size that was not foreseen is met before it is recorded: what comes once never pays."""

MOST_RECORDINGS = MOST_SIZES + 4
"""Of foreseen sizes, and some others. Each takes 10 to 60 MB of the driver's memory."""

_MOST_RARE = 200
_FIRST_STEP, _EARLY = "the first step", "made ready before all was known that its kernels read"
_TOO_LARGE, _RARE = "too large for one copy", "of a size that was not foreseen"
_MANY_PAIRS = "with more pairs of tokens than gradients are kept for"
_FULL, _FAILED, _OFF = "of too many sizes", "that could not be recorded", "while nothing is recorded"


def rows_of_items(rows: Rows, batch: SequenceBatch) -> tuple[Tensor, Rows]:
    """Where item vectors are rows of their table, and there is no other."""
    return rows[TABLE], {}


Later = Sequence[tuple[torch.cuda.CUDAGraph | None, tuple[DensePiece, ...]]]
"""Graphs of gradients that are put off, and the pieces of all gradients that are complete behind each."""


@dataclass(frozen=True, eq=False)
class _Recording:
    """Graphs, what they read of a batch, what must live as long as they do; and what is computed later."""

    graphs: Sequence[CutGraph]
    memory: Tensor
    batch: PaddedBatch
    later: Later


@dataclass(frozen=True, eq=False)
class WholeStep:
    """What a step does beside loss and gradients, where it reads and updates rows and weights by itself.

    Args:
        tables: whose rows batches name.
        dropout_key: [1] where masks are drawn by it.
        dense_lr: [] where the optimizer reads it.
        update: scales gradients and moves weights; returns the norm of the gradients, if it was asked for.
    """

    tables: Mapping[str, EmbeddingTable]
    dropout_key: Tensor
    dense_lr: Tensor
    update: Callable[[], Tensor | None]


class PaddedCompute:
    """Computes loss and gradients of padded batches; gradients lie in the same places after every one.

    With `whole` a recording is the step: its numbers and rows are read, and rows and weights updated, inside. `flat`
    holds all gradients of parameters one after the other, for those who add them up over ranks.

    Args:
        model: (item vectors, batch, layout, rows) -> sum of the losses; the dense part, not wrapped.
        parameters: whose gradients are wanted.
        precision: a context in which the forward runs.
        recorder: records sizes that come often.
        whole: what else is done in a step, inside.
        vectors_of: makes item vectors; they are rows of their table unless given.
        postpone_bytes: gradients of weights are computed by `compute_later`, and what is kept for them may take as
            much; None: with all others.
        late: updates weights as the forward reaches them, where they were left to it.
        piece_bytes: about how large the pieces are that gradients are then handed over in; all at once unless given.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        precision: Callable[[], AbstractContextManager[None]],
        recorder: Recorder,
        whole: WholeStep | None = None,
        vectors_of: VectorsOf = rows_of_items,
        postpone_bytes: int | None = None,
        piece_bytes: int | None = None,
        late: LateUpdate | None = None,
    ) -> None:
        assert whole is None or postpone_bytes is None, "a whole step has nobody to wait for"
        self._whole, self._vectors_of = whole, vectors_of
        self._norm: Tensor | None = None
        self._model, self._parameters, self._precision = model, list(parameters), precision
        self._recorder = recorder
        device = self._parameters[0].device
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self.flat, self._grads = _side_by_side(self._parameters)
        self._used: list[bool] | None = None
        self.later: PostponedPieces | None = None
        if postpone_bytes is not None:
            self.later = PostponedPieces(
                *(self._parameters, self._grads, self.flat),
                most_bytes=postpone_bytes,
                piece_bytes=piece_bytes or self.flat.nbytes,
            )
        self._late = late
        self._put_off: Later | None = None
        self._direct: set[int] = set()
        self._rooms: dict[tuple[int, ...], RowRoom] = {}
        self._like: Rows | None = None
        self._replays = 0
        self._ahead = False
        self.usual: Counter[str] = Counter()
        """Why batches were computed as usual, and how many."""
        self._met: Counter[tuple[Any, ...]] = Counter()
        self._recordings: dict[tuple[Any, ...], _Recording] = {}

    def is_recorded(self, padded: PaddedBatch) -> bool:
        """Whether a batch will be replayed; records its size where it is time to, and with it all that are foreseen."""
        reason = None if self._recording_of(padded) is not None else self._why_not(padded)
        if reason is not None:
            self.usual[reason] += 1
        self._replays += reason is None
        return reason is None

    def are_recorded(self, parts: Sequence[PaddedBatch]) -> bool:
        """Whether all of a step's micro-batches will be replayed; each is asked."""
        recorded = [self.is_recorded(part) for part in parts]
        return all(recorded)

    def share(self) -> float:
        """Of all padded batches so far, those that were replayed."""
        return self._replays / max(1, self._replays + sum(self.usual.values()))

    def story(self) -> str | None:
        """How many batches were replayed, and why others were not; None where none was padded."""
        others = sum(self.usual.values())
        if not others + self._replays:
            return None
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.usual.most_common())
        total, recordings = self._replays + others, len(self._recordings)
        told = f"{self._replays:,} of {total:,} batches replayed from {recordings} recordings"
        return f"{told}; not replayed: {reasons}" if reasons else told

    def _why_not(self, padded: PaddedBatch) -> str | None:
        """Why a batch is not replayed; None: it was recorded now."""
        if not self._recorder.on:
            return _OFF
        if self._like is None:
            return _FIRST_STEP
        if not padded.in_one_piece:
            return _TOO_LARGE
        if not padded.fixed:
            return _MANY_PAIRS
        self._met[padded.key] += 1
        if padded.foreseen is None and self._met[padded.key] < RECORD_AT:
            if self.usual[_RARE] == _MOST_RARE and not self._recordings:
                self._recorder.give_up(f"no size of a batch came {RECORD_AT} times in {_MOST_RARE} steps")
            return _RARE
        if len(self._recordings) >= MOST_RECORDINGS:
            self._recorder.give_up(f"those of rarer sizes, as batches come in more than {MOST_RECORDINGS}")
            return _FULL
        if padded.foreseen is not None and not self._ahead:
            if _is_early(padded):
                return _EARLY  # the next one is not
            self._ahead = True
            # The largest comes first: in the memory it takes, all others find room.
            for other in padded.foreseen():
                if not self._recorder.on:
                    break
                new = other.copyable and other.key not in self._recordings
                if new and len(self._recordings) < MOST_RECORDINGS:
                    self._record(other)
        if padded.key in self._recordings:
            return None
        return self._record(padded) if self._recorder.on else _FAILED

    def run(self, rows: Rows, padded: PaddedBatch) -> tuple[Tensor, Rows]:
        """The loss of a batch, and the gradients of its rows by table; both are overwritten by the next call.

        Gradients of the parameters are in their `.grad`, or will be after `compute_later`.
        """
        if self._like is None:
            self._like = {name: each[:0].detach() for name, each in rows.items()}
        room = self._room(padded)
        room.fill(rows)
        found = self._recording_of(padded)
        if found is None:
            self._compute(room, padded.views)
        else:
            self._replay(found, padded)
        self._put_off = None if found is None else found.later
        if self.later is None:
            self._hand_out()
        return self._loss, {name: grad[: padded.real_rows[name]] for name, grad in room.grad.items()}

    def compute_later(self, complete: Callable[[DensePiece], None]) -> None:
        """Gradients of the last `run` that were put off.

        Args:
            complete: told each piece of all gradients once it is complete, in their order.
        """
        assert self.later is not None
        if self._put_off is None:
            for num_weights, pieces in self.later.groups(self._direct):
                self.later.compute(num_weights)
                for piece in pieces:
                    complete(piece)
        else:
            for graph, pieces in self._put_off:
                if graph is not None:
                    graph.replay()
                for piece in pieces:
                    complete(piece)
        self._hand_out()

    def run_parts(self, rows: Rows, parts: Sequence[PaddedBatch]) -> tuple[Tensor, Rows]:
        """The same of micro-batches of one batch, added up in their order."""
        loss, grads = self.run(rows, parts[0])
        if len(parts) == 1:
            return loss, grads
        assert self.later is None, "micro-batches would add up gradients that are put off"
        sums = [each.clone() for each in (loss, self.flat, *grads.values())]
        for part in parts[1:]:
            loss, grads = self.run(rows, part)
            torch._foreach_add_(sums, [loss, self.flat, *grads.values()])
        self.flat.copy_(sums[1])
        return sums[0], dict(zip(grads, sums[2:]))

    def run_whole(self, padded: PaddedBatch) -> tuple[Tensor, Tensor | None]:
        """A whole step; its loss, and the norm of the gradients if asked for. The next call overwrites both."""
        found = self._recording_of(padded)
        if found is None:
            assert self._whole is not None
            if self._like is None:
                weights = {name: table.weight for name, table in self._whole.tables.items()}
                self._like = {
                    name: as_compute(each.new_zeros(0, each.shape[1])) for name, each in weights.items()
                }
            self._compute(self._room(padded), padded.views)
        else:
            self._replay(found, padded)
        return self._loss, self._norm

    def _replay(self, recording: _Recording, padded: PaddedBatch) -> None:
        recording.memory.copy_(padded.memory[0][: padded.num_bytes], non_blocking=True)
        if self._late is not None:
            self._late.begin()
        for layer, graph in recording.graphs:
            if layer is not None:
                assert self._late is not None
                self._late.reach(layer)
            graph.replay()
        if self._late is not None:
            self._late.end_replay()

    def _recording_of(self, padded: PaddedBatch) -> _Recording | None:
        """One that takes this batch: made ready before parcels had grown, it may not lie in one piece as others do."""
        return self._recordings.get(padded.key) if padded.copyable else None

    def _room(self, padded: PaddedBatch) -> RowRoom:
        places = tuple(padded.num_rows.values())
        if places not in self._rooms:
            assert self._like is not None
            made_of_rows = self._vectors_of is not rows_of_items
            self._rooms[places] = RowRoom(padded.num_rows, self._like, clean=made_of_rows)
        return self._rooms[places]

    def _compute(self, room: RowRoom, views: PaddedViews) -> None:
        if self._whole is not None:
            self._read_step(self._whole, room, views)
        self._forward_backward(room, views)
        if self._whole is not None:
            self._update(self._whole, room, views)

    def _forward_backward(self, room: RowRoom, views: PaddedViews) -> None:
        """Loss and gradients to where they belong."""
        if self._late is not None:
            self._late.begin()  # item vectors are made before the model is called
        with nullcontext() if self.later is None else self.later.taking():
            with self._precision():
                vectors, tables = self._vectors_of(room.rows, views.batch)
                loss = self._model(vectors, views.batch, views.layout, tables) / views.divisor
            # On a GPU autograd would hand the backward over to a thread of its own, which is not recorded.
            with torch.autograd.set_multithreading_enabled(False):
                leaves = [*room.rows.values(), *self._parameters]
                found = torch.autograd.grad(loss, leaves, allow_unused=True)
        self._used = [grad is not None for grad in found[len(room.rows) :]]
        if self.later is not None:
            self._direct = {id(param) for param, used in zip(self._parameters, self._used) if used}
            known = self._direct.union(map(id, self.later.postponed.waiting))
            self._used = [id(param) in known for param in self._parameters]
        places = [*room.grad.values(), *self._grads]
        pairs = [(to, grad) for to, grad in zip(places, found) if grad is not None]
        with torch.no_grad():
            self._loss.copy_(loss.detach())
            torch._foreach_copy_([to for to, _ in pairs], [grad for _, grad in pairs])

    @torch.no_grad()
    def _read_step(self, whole: WholeStep, room: RowRoom, views: PaddedViews) -> None:
        """The numbers of the step, and the rows of its batch; behind the real ones stand numbers nobody reads."""
        whole.dropout_key.copy_(views.numbers.dropout_key)
        whole.dense_lr.copy_(views.numbers.dense_lr)
        for (name, table), numbers in zip(whole.tables.items(), views.numbers.tables, strict=True):
            room.read(name, table.gather(views.unique[name]), numbers.real_rows)

    @torch.no_grad()
    def _update(self, whole: WholeStep, room: RowRoom, views: PaddedViews) -> None:
        """Rows, then weights."""
        for (name, table), numbers in zip(whole.tables.items(), views.numbers.tables, strict=True):
            rows, grad = views.unique[name], room.grad[name]
            table.apply_counted(rows, grad, numbers=numbers.rows, count=numbers.real_rows)
        self._hand_out()
        norm = whole.update()
        if norm is not None:
            # In one place, whichever recording has worked it out.
            self._norm = torch.zeros_like(norm) if self._norm is None else self._norm
            self._norm.copy_(norm)

    def _hand_out(self) -> None:
        """Gradients to the parameters that have some."""
        assert self._used is not None
        for param, grad, used in zip(self._parameters, self._grads, self._used):
            param.grad = grad if used else None

    def _record(self, padded: PaddedBatch) -> str | None:
        """Record the size of this batch, if all that its kernels read is among what travels with it; else why not."""
        memory, again = _again(padded)
        if again.key != padded.key:
            return _EARLY
        room = self._room(padded)
        # Kernels of this size are compiled and loaded by this: no recording may wait for that. Nothing is updated, and
        # what it leaves is overwritten by the step to come.
        if self._late is not None:
            self._late.settle()
        work = partial(self._try_all, room, padded.views)
        if not self._recorder.try_out(work, size=padded.num_tokens, shrink=self._postpone_less):
            return _FAILED
        views = again.views  # in which nothing has been worked out yet, so that all of it is recorded
        views.layout.seal()
        graphs = self._record_compute(room, views)
        later = None if graphs is None else self._record_later()
        if graphs is None or later is None:
            if self.later is not None:
                self.later.forget()
            return _FAILED
        self._recordings[padded.key] = _Recording(graphs, memory, again, later)
        padded.replayed.add(padded.key)
        return None

    def _try_all(self, room: RowRoom, views: PaddedViews) -> None:
        self._forward_backward(room, views)
        if self.later is not None:
            for num_weights, _ in self.later.groups(self._direct):
                self.later.compute(num_weights)

    def _postpone_less(self) -> bool:
        """Keep less for gradients that are put off; False where that is nothing already."""
        return self.later is not None and self.later.postponed.keep_less()

    def _record_compute(self, room: RowRoom, views: PaddedViews) -> Sequence[CutGraph] | None:
        """One graph; or several, cut where weights may have to be updated between them."""
        if self._late is None or self.later is None:
            graph = self._recorder.record(lambda: self._compute(room, views))
            return None if graph is None else [CutGraph(None, graph)]
        needed = {self._late.layer_of(piece.params) for piece in self.later.pieces}
        late = self._late

        def work(cut: Callable[[int], None]) -> None:
            late.at_layer = lambda number: cut(number) if number in needed else None
            try:
                self._compute(room, views)
            finally:
                late.at_layer = lambda number: None

        return self._recorder.record_in_pieces(work)

    def _record_later(self) -> Later | None:
        """What the backward that was recorded last has put off; None where it cannot be recorded."""
        recorded: list[tuple[torch.cuda.CUDAGraph | None, tuple[DensePiece, ...]]] = []
        for num_weights, pieces in [] if self.later is None else self.later.groups(self._direct):
            assert self.later is not None
            graph = self._recorder.record(partial(self.later.compute, num_weights)) if num_weights else None
            if num_weights and graph is None:
                return None
            recorded.append((graph, pieces))
        return recorded


def _again(padded: PaddedBatch) -> tuple[Tensor, PaddedBatch]:
    """The same batch in memory of its own."""
    memory = torch.empty(padded.num_bytes, dtype=torch.uint8, device=padded.memory[0].device)
    return memory, padded.again(memory)


def _is_early(padded: PaddedBatch) -> bool:
    """Whether it was made ready before all was known that its kernels read; made again, it has more."""
    return _again(padded)[1].key != padded.key


def _side_by_side(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """Zeros in one piece of memory, and in it those of each parameter; each begins on 16 bytes, as kernels like it."""
    like = parameters[0]
    wide = [-(-param.numel() // 4) * 4 for param in parameters]
    flat = torch.zeros(sum(wide), dtype=like.dtype, device=like.device)
    own = [part[: param.numel()].view_as(param) for part, param in zip(flat.split(wide), parameters)]
    return flat, own
