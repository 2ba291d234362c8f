"""FlatGradients: loss and gradients of a padded batch, in places that stay the same: what a recording computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from freescale.data import SequenceBatch
from freescale.pipeline import TABLE, PaddedViews
from freescale.train.compute.late_update import LateUpdate
from freescale.train.compute.postponed_pieces import PostponedPieces
from freescale.train.compute.row_room import RowRoom, Rows

VectorsOf = Callable[[Rows, SequenceBatch], tuple[Tensor, Rows]]
"""Item vectors of a batch from the unique rows of all tables, and the rows that its tokens read beside them."""


def rows_of_items(rows: Rows, batch: SequenceBatch) -> tuple[Tensor, Rows]:
    """Where item vectors are rows of their table, and there is no other."""
    return rows[TABLE], {}


class FlatGradients:
    """Computes loss and gradients; those of parameters lie one after the other in `flat`.

    Args:
        model: (item vectors, batch, layout, rows) -> sum of the losses; the dense part, not wrapped.
        parameters: whose gradients are wanted.
        precision: a context in which the forward runs.
        vectors_of: makes item vectors.
        postpone_bytes: gradients of weights wait in `later`, and what is kept for them may take as much; None: they
            come with all others.
        piece_bytes: about how large the pieces are that these are cut into; one of all unless given.
        late: updates weights as the forward reaches them, where they were left to it.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        precision: Callable[[], AbstractContextManager[None]],
        vectors_of: VectorsOf,
        postpone_bytes: int | None,
        piece_bytes: int | None,
        late: LateUpdate | None,
    ) -> None:
        self._model, self._parameters, self._precision = model, list(parameters), precision
        self._vectors_of, self._late = vectors_of, late
        self.loss = torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)
        self.flat, self._grads = _side_by_side(self._parameters)
        self.used: list[bool] = []
        """By parameter, whether the last batch has a gradient of it."""
        self.direct: set[int] = set()
        """Parameters (their ids) whose gradient, or a part of it, came with the backward."""
        self.later: PostponedPieces | None = None
        if postpone_bytes is not None:
            self.later = PostponedPieces(
                *(self._parameters, self._grads, self.flat),
                most_bytes=postpone_bytes,
                piece_bytes=piece_bytes or self.flat.nbytes,
                unit_of=None if late is None else late.unit_of,
            )

    def compute(self, room: RowRoom, views: PaddedViews) -> None:
        """Loss and gradients to where they belong; without those that wait."""
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
        self.used = [grad is not None for grad in found[len(room.rows) :]]
        if self.later is not None:
            self.direct = {id(param) for param, used in zip(self._parameters, self.used) if used}
            known = self.direct.union(map(id, self.later.postponed.waiting))
            self.used = [id(param) in known for param in self._parameters]
        places = [*room.grad.values(), *self._grads]
        pairs = [(to, grad) for to, grad in zip(places, found) if grad is not None]
        with torch.no_grad():
            self.loss.copy_(loss.detach())
            torch._foreach_copy_([to for to, _ in pairs], [grad for _, grad in pairs])

    def compute_all(self, room: RowRoom, views: PaddedViews) -> None:
        """Those that wait, too."""
        self.compute(room, views)
        if self.later is not None:
            for num_weights, _ in self.later.groups(self.direct):
                self.later.compute(num_weights)

    @contextmanager
    def keeping_buffers(self) -> Iterator[None]:
        """What is computed inside is a trial: what modules count on the way is as it was before."""
        kept = [(buffer, buffer._version, buffer.clone()) for buffer in self._model.buffers()]
        try:
            yield
        finally:
            for buffer, version, before in kept:
                if buffer._version != version:  # of others, some cannot even be written
                    buffer.copy_(before)

    def hand_out(self) -> None:
        """Gradients to the parameters that have some."""
        for param, grad, used in zip(self._parameters, self._grads, self.used, strict=True):
            param.grad = grad if used else None

    def postpone_less(self) -> bool:
        """Keep less for gradients that wait; False where that is nothing already."""
        return self.later is not None and self.later.postponed.keep_less()

    def late_updates(self) -> dict[int, dict[nn.Parameter, Tensor]]:
        """By layer, weights whose update a recording can hold, and where their gradients lie; unused ones have none."""
        found: dict[int, dict[nn.Parameter, Tensor]] = {}
        used = {id(param): param for param, is_used in zip(self._parameters, self.used) if is_used}
        if self._late is None or self.later is None or not self._late.can_record(used.values()):
            return found
        for piece in self.later.pieces:
            own = {param: place for param, place in zip(piece.params, piece.places) if id(param) in used}
            if own:
                found.setdefault(self._late.layer_of(piece.params), {}).update(own)
        return found


def _side_by_side(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """Zeros in one piece of memory, and in it those of each parameter; each begins on 16 bytes, as kernels like it."""
    like = parameters[0]
    wide = [-(-param.numel() // 4) * 4 for param in parameters]
    flat = torch.zeros(sum(wide), dtype=like.dtype, device=like.device)
    own = [part[: param.numel()].view_as(param) for part, param in zip(flat.split(wide), parameters)]
    return flat, own
