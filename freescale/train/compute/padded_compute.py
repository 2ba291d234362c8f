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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from freescale.embedding import EmbeddingTable, as_compute
from freescale.pipeline import PaddedBatch, PaddedViews
from freescale.train.compute.flat_gradients import FlatGradients, VectorsOf, rows_of_items
from freescale.train.compute.late_update import BEFORE, LateUpdate
from freescale.train.compute.postponed_pieces import DensePiece
from freescale.train.compute.recorder import CutGraph, Recorder
from freescale.train.compute.recordings import PostponedGraphs, Recording, Recordings
from freescale.train.compute.row_room import RowRoom, Rows


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
        self._whole, self._recorder, self._late = whole, recorder, late
        self._made_of_rows = vectors_of is not rows_of_items
        self._norm: Tensor | None = None
        self._gradients = FlatGradients(
            model,
            parameters,
            precision=precision,
            vectors_of=vectors_of,
            postpone_bytes=postpone_bytes,
            piece_bytes=piece_bytes,
            late=late,
        )
        self.flat, self.later = self._gradients.flat, self._gradients.later
        self._put_off: PostponedGraphs | None = None
        self._rooms: dict[tuple[int, ...], RowRoom] = {}
        self._like: Rows | None = None
        self.recordings = Recordings(recorder, self._record)

    def run(self, rows: Rows, padded: PaddedBatch) -> tuple[Tensor, Rows]:
        """The loss of a batch, and the gradients of its rows by table; both are overwritten by the next call.

        Gradients of the parameters are in their `.grad`, or will be after `compute_later`.
        """
        if self._like is None:
            self._like = {name: each[:0].detach() for name, each in rows.items()}
            self.recordings.can_begin = True
        room = self._room(padded)
        room.fill(rows)
        found = self.recordings.find(padded)
        if found is None:
            self._compute(room, padded.views)
        else:
            self._replay(found, padded)
        self._put_off = None if found is None else found.later
        if self.later is None:
            self._gradients.hand_out()
        return self._gradients.loss, {
            name: grad[: padded.real_rows[name]] for name, grad in room.grad.items()
        }

    def compute_later(self, complete: Callable[[DensePiece], None]) -> None:
        """Gradients of the last `run` that were put off.

        Args:
            complete: told each piece of all gradients once it is complete, in their order.
        """
        assert self.later is not None
        if self._put_off is None:
            for num_weights, pieces in self.later.groups(self._gradients.direct):
                self.later.compute(num_weights)
                for piece in pieces:
                    complete(piece)
        else:
            for graph, pieces in self._put_off:
                if graph is not None:
                    graph.replay()
                for piece in pieces:
                    complete(piece)
        self._gradients.hand_out()

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
        found = self.recordings.find(padded)
        if found is None:
            assert self._whole is not None
            if self._like is None:
                weights = {name: table.weight for name, table in self._whole.tables.items()}
                self._like = {
                    name: as_compute(each.new_zeros(0, each.shape[1])) for name, each in weights.items()
                }
                self.recordings.can_begin = True
            self._compute(self._room(padded), padded.views)
        else:
            self._replay(found, padded)
        return self._gradients.loss, self._norm

    def _replay(self, recording: Recording, padded: PaddedBatch) -> None:
        recording.memory.copy_(padded.memory[0][: padded.num_bytes], non_blocking=True)
        if self._late is not None:
            self._late.begin_replay(recording.updates)
        for layer, graph in recording.graphs:
            if layer is not None:
                assert self._late is not None
                self._late.reach(layer)
            graph.replay()
        if self._late is not None:
            self._late.end_replay()

    def _room(self, padded: PaddedBatch) -> RowRoom:
        places = tuple(padded.num_rows.values())
        if places not in self._rooms:
            assert self._like is not None
            self._rooms[places] = RowRoom(padded.num_rows, self._like, clean=self._made_of_rows)
        return self._rooms[places]

    def _compute(self, room: RowRoom, views: PaddedViews) -> None:
        if self._whole is not None:
            self._read_step(self._whole, room, views)
        self._gradients.compute(room, views)
        if self._whole is not None:
            self._update(self._whole, room, views)

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
        self._gradients.hand_out()
        norm = whole.update()
        if norm is not None:
            # In one place, whichever recording has worked it out.
            self._norm = torch.zeros_like(norm) if self._norm is None else self._norm
            self._norm.copy_(norm)

    def _record(self, padded: PaddedBatch, memory: Tensor, again: PaddedBatch) -> Recording | None:
        """Record the size of this batch, over the same batch in memory of its own; None where it cannot be recorded."""
        room = self._room(padded)
        # Kernels of this size are compiled and loaded by this: no recording may wait for that. Nothing is updated, and
        # what it leaves is overwritten by the step to come.
        if self._late is not None:
            self._late.settle()
        work = partial(self._gradients.compute_all, room, padded.views)
        with self._gradients.keeping_buffers():
            if not self._recorder.try_out(work, size=padded.num_tokens, shrink=self._gradients.postpone_less):
                return None
        views = again.views  # in which nothing has been worked out yet, so that all of it is recorded
        views.layout.seal()
        made = self._record_compute(room, views)
        later = None if made is None else self._record_later()
        if made is None or later is None:
            if self.later is not None:
                self.later.forget()
            return None
        graphs, updates = made
        return Recording(graphs, memory, again, later, updates)

    def _record_compute(
        self, room: RowRoom, views: PaddedViews
    ) -> tuple[Sequence[CutGraph], frozenset[int] | None] | None:
        """One graph; or several, cut where sums of gradients may have to be waited for, with updates behind.

        And the weights (their ids) that these update; None where a layer was not called, or so that nobody heard of it.
        """
        if self._late is None or self.later is None:
            graph = self._recorder.record(lambda: self._compute(room, views))
            return None if graph is None else ([CutGraph(None, graph)], frozenset())
        late, updates = self._late, self._gradients.late_updates()
        late.warm_up(updates.values())
        needed = {late.layer_of(piece.params) for piece in self.later.pieces}
        recorded: set[int] = set()

        def work(cut: Callable[[int], None]) -> None:
            left = sorted(needed)

            def reached(number: int) -> None:
                # All up to it, as `LateUpdate` does it: layers may be called in another order than they stand in.
                due = [layer for layer in left if layer <= number]
                del left[: len(due)]
                if any(layer != BEFORE for layer in due):
                    cut(number)
                for layer in due:
                    if layer in updates:
                        late.record(updates[layer])
                        recorded.add(layer)

            late.at_layer = reached
            try:
                if updates:
                    late.record_count(param for each in updates.values() for param in each)
                reached(BEFORE)
                self._compute(room, views)
            finally:
                late.at_layer = lambda number: None

        graphs = self._recorder.record_in_pieces(work)
        if graphs is None:
            return None
        inside = frozenset(id(param) for each in updates.values() for param in each)
        return graphs, inside if recorded == set(updates) else None

    def _record_later(self) -> PostponedGraphs | None:
        """What the backward that was recorded last has put off; None where it cannot be recorded."""
        recorded: list[tuple[torch.cuda.CUDAGraph | None, tuple[DensePiece, ...]]] = []
        for num_weights, pieces in [] if self.later is None else self.later.groups(self._gradients.direct):
            assert self.later is not None
            graph = self._recorder.record(partial(self.later.compute, num_weights)) if num_weights else None
            if num_weights and graph is None:
                return None
            recorded.append((graph, pieces))
        return recorded
