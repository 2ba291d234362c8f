"""LateUpdate: a layer's weights are updated when the next forward reaches it; until then their sums may travel.

    gradients of weights, lowest layer first ┃ next step: rows, inputs ┃ layer 0 ┃ layer 1 ┃ ...
      └── sum 0 ──> └── sum 1 ──> └── ...                  update 0 ─┘ update 1 ─┘

Nobody sees it: every weight is what it would be when somebody reads it. That holds for layers whose encoder says so
(`calls_layers`), as far as the last forward has called them; all others are updated before the forward begins, and
whoever wants to see the weights between two steps settles first. A forward at whose end weights are still to be updated
has read old ones, and is refused.

A recorded forward has the updates in it, where its layers are reached. All that is left to do for a replay is to wait:

    wait for sum 0 ┃ update 0, layer 0 ┃ wait for sum 1 ┃ update 1, layer 1 ┃ ...

Where weights were settled before, its updates do nothing: they read from the device whether they are due.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from freescale import trace
from freescale.balance import bucket_bytes
from freescale.errors import TrainingError
from freescale.train.accounts.timer import StepTimer
from freescale.train.compute.dense_gradients import in_pieces, lying_in
from freescale.train.compute.update_if_due import UpdateIfDue, update_only

BEFORE = -1
"""The layer of weights that belong to none: all of them are needed when a forward begins."""


class Piece(NamedTuple):
    """Gradients that are being added up over the ranks, in one tensor: one after the other, or each in its place."""

    params: Sequence[nn.Parameter]
    flat: Tensor
    wait: Callable[[], object]
    arrival: trace.Arrival | None
    places: Sequence[Tensor] | None = None

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its own."""
        if self.places is None:
            return lying_in(self.flat, self.params)
        return zip(self.params, self.places, strict=True)


class _Travelling(NamedTuple):
    """A piece, and the first layer that needs its weights."""

    piece: Piece
    layer: int


class LateUpdate:
    """Gradients on their way, and what is done with them once somebody needs the weights.

    Args:
        model: whose forward they are needed in.
        optimizer: of its weights.
        timer: of the step in which they are waited for.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, timer: StepTimer) -> None:
        self._optimizer, self._timer = optimizer, timer
        self._if_due = UpdateIfDue(optimizer)
        self._by_replay = False
        self._layers = layers_of(model)
        self._place = _places(self._layers)
        self._called: set[int] = set()
        self._calling: set[int] = set()
        self._travelling: list[_Travelling] = []
        self._lr: float | Tensor = 0.0
        self._in_step = False
        self.at_layer: Callable[[int], None] = lambda number: None
        """Told when a forward reaches a layer; a replay says so itself (`reach`)."""
        model.register_forward_pre_hook(self._begins)
        model.register_forward_hook(self._ends)
        for number, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self._reaches(number))

    def layer_of(self, params: Sequence[nn.Parameter]) -> int:
        """The first layer that needs any of these weights."""
        return min(self._place.get(id(param), BEFORE) for param in params)

    def in_order(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What is needed first comes first: it is added up first."""
        return sorted(params, key=self.unit_of)

    def unit_of(self, param: nn.Parameter) -> int:
        """Weights that are needed at once should be added up together."""
        return self.layer_of([param])

    def leave(self, piece: Piece, *, lr: float | Tensor, layer: int | None = None) -> None:
        """These gradients are on their way; their weights are updated with this rate, for this layer if it is given."""
        for param in piece.params:
            param.grad = None  # this rank's own part, which is in the sum
        layer = self.layer_of(piece.params) if layer is None else layer
        self._travelling.append(_Travelling(piece, layer))
        self._lr = lr

    def begin(self) -> None:
        """A forward begins, or what it reads is about to be made: update all but the layers that it will call."""
        self._calling = set()
        self._update(lambda one: one.layer not in self._called)

    def reach(self, number: int) -> None:
        """It has come to this layer."""
        self._calling.add(number)
        self._update(lambda one: one.layer <= number)

    def can_record(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether recordings can hold the updates of these weights, too."""
        return self._if_due.possible and self._if_due.knows(params)

    def warm_up(self, updates: Iterable[Mapping[nn.Parameter, Tensor]]) -> None:
        """Load the kernels of updates that are about to be recorded, which none may wait for; they move nothing."""
        self._if_due.tell(False)
        for gradients in updates:
            self._if_due.count(gradients)
            self._if_due.run(gradients)

    def record_count(self, params: Iterable[nn.Parameter]) -> None:
        """A forward that is being recorded begins, and will update these weights."""
        self._if_due.count(params)

    def record(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """A forward that is being recorded gets where these weights are needed: its replays update them here.

        Their gradients lie in these places whenever it is replayed.
        """
        self._if_due.run(gradients)

    def begin_replay(self, updates: Collection[int] | None) -> None:
        """A replay begins, which updates these weights by itself (their ids), each when it gets there.

        It does so where just these are left to be updated; else, and where not all of its updates are in it (None),
        everything is updated now. One without updates has them between its graphs.
        """
        left = {id(param) for one in self._travelling for param in one.piece.params}
        self._by_replay = bool(left) and left == updates
        if not self._by_replay and (updates is None or updates):
            self._update(lambda one: True)
        self._if_due.tell(self._by_replay)
        self.begin()

    def end_replay(self) -> None:
        """A replay has reached all layers that its recording did."""
        self._in_step = self._by_replay = False
        self._refuse_old_weights()

    def step_begins(self) -> None:
        """The next forward is that of a step, in which waits are accounted for."""
        self._in_step = True

    def settle(self) -> None:
        """Update everything: before weights are looked at from outside a step."""
        self._in_step = self._by_replay = False
        self._update(lambda one: True)

    def _begins(self, *_: Any) -> None:
        self.begin()

    def _reaches(self, number: int) -> None:
        self.at_layer(number)
        self.reach(number)

    def _ends(self, *_: Any) -> None:
        self._called, self._in_step = self._calling, False
        self._refuse_old_weights()

    def _refuse_old_weights(self) -> None:
        if self._travelling:
            raise TrainingError(
                "a forward has read weights that were not updated yet",
                got=f"layer {self._travelling[0].layer} was called in the forward before, and not in this one",
                next_step="pipeline.postpone=off, or leave `calls_layers` out of the encoder",
            )

    def _update(self, is_due: Callable[[_Travelling], bool]) -> None:
        due = [one.piece for one in self._travelling if is_due(one)]
        if not due:
            return
        self._travelling = [one for one in self._travelling if not is_due(one)]
        with self._standing_still(), torch.no_grad():
            for piece in due:
                waiting = trace.mark()
                piece.wait()
                trace.waited(piece.arrival, waiting, on_device=piece.flat.is_cuda)
            if self._by_replay:
                return
            with trace.compute("update weights"):
                self._step(due)

    def _step(self, due: Sequence[Piece]) -> None:
        """Update these weights and no others: those that were not left had their turn at the end of their step."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr
        update_only(self._optimizer, {param: grad for piece in due for param, grad in piece.gradients()})

    def _standing_still(self) -> AbstractContextManager[None]:
        """Inside the forward of a step it is no compute of the samples."""
        return self._timer.standing_still() if self._in_step else nullcontext()


def by_layer(model: nn.Module) -> list[list[nn.Parameter]]:
    """Weights that are updated together, in their order: of pieces of gradients that the same layer waits for first."""
    place = _places(layers_of(model))

    def layer_of(param: nn.Parameter) -> int:
        return place.get(id(param), BEFORE)

    ordered = sorted(model.parameters(), key=layer_of)
    found: dict[int, list[nn.Parameter]] = {}
    for piece in in_pieces(ordered, bucket_bytes(sum(param.nbytes for param in ordered)), layer_of):
        found.setdefault(layer_of(piece[0]), []).extend(piece)
    return list(found.values())


def _places(layers: Sequence[nn.Module]) -> dict[int, int]:
    """Which layer needs a weight (its id) first; a weight that two of them share is needed by the first."""
    numbered = reversed(list(enumerate(layers)))
    return {id(param): number for number, layer in numbered for param in layer.parameters()}


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """The layers that a forward calls one after the other, where the encoder says that nobody else reads them."""
    encoder = getattr(model, "encoder", None)
    if not getattr(encoder, "calls_layers", False):
        return ()
    layers = getattr(encoder, "layers", None)
    if not isinstance(layers, Iterable) or not all(isinstance(layer, nn.Module) for layer in layers):
        raise TrainingError(
            "the encoder says `calls_layers`, but has no `layers` to call",
            got=f"{type(encoder).__name__}.layers is {type(layers).__name__}",
            allowed="an nn.ModuleList of the modules that its forward calls one after the other",
        )
    return list(layers)
