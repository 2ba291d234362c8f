"""LateUpdate: a layer's weights are updated when the next forward reaches it; until then their sums may travel.

    gradients of weights, lowest layer first ┃ next step: rows, inputs ┃ layer 0 ┃ layer 1 ┃ ...
      └── sum 0 ──> └── sum 1 ──> └── ...                  update 0 ─┘ update 1 ─┘

Nobody sees it: every weight is what it would be when somebody reads it. That holds for layers whose encoder says so
(`calls_layers`), as far as the last forward has called them; all others are updated before the forward begins, and
whoever wants to see the weights between two steps settles first. A forward at whose end weights are still to be updated
has read old ones, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from freescale import trace
from freescale.errors import TrainingError
from freescale.train.accounts.timer import StepTimer
from freescale.train.compute.dense_gradients import hand_out

BEFORE = -1
"""The layer of weights that belong to none: all of them are needed when a forward begins."""


class Piece(NamedTuple):
    """Gradients that are being added up over the ranks, in one tensor: one after the other, or each in its place."""

    params: Sequence[nn.Parameter]
    flat: Tensor
    wait: Callable[[], object]
    arrival: trace.Arrival | None
    places: Sequence[Tensor] | None = None

    def hand_out(self) -> None:
        """Each to its parameter."""
        if self.places is None:
            hand_out(self.params, self.flat)
            return
        for param, place in zip(self.params, self.places, strict=True):
            param.grad = place


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
        self._layers = layers_of(model)
        self._place: dict[int, int] = {}
        for number, layer in reversed(list(enumerate(self._layers))):
            # A weight that two of them share is needed by the first.
            self._place.update((id(param), number) for param in layer.parameters())
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

    def end_replay(self) -> None:
        """A replay has reached all layers that its recording did."""
        self._in_step = False
        assert not self._travelling, "a replay has read weights that were not updated yet"

    def step_begins(self) -> None:
        """The next forward is that of a step, in which waits are accounted for."""
        self._in_step = True

    def settle(self) -> None:
        """Update everything: before weights are looked at from outside a step."""
        self._in_step = False
        self._update(lambda one: True)

    def _begins(self, *_: Any) -> None:
        self.begin()

    def _reaches(self, number: int) -> None:
        self.at_layer(number)
        self.reach(number)

    def _ends(self, *_: Any) -> None:
        self._called, self._in_step = self._calling, False
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
            # As at the end of a step, where nothing is computed in half precision.
            with trace.compute("update weights"), torch.autocast(due[0].flat.device.type, enabled=False):
                self._step(due)

    def _step(self, due: Sequence[Piece]) -> None:
        """Update these weights and no others: those that were not left had their turn at the end of their step."""
        everything = [param for group in self._optimizer.param_groups for param in group["params"]]
        others = [(param, param.grad) for param in everything if param.grad is not None]
        for param, _ in others:
            param.grad = None
        for piece in due:
            piece.hand_out()
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr
        self._optimizer.step()
        for piece in due:
            for param in piece.params:
                param.grad = None
        for param, grad in others:
            param.grad = grad

    def _standing_still(self) -> AbstractContextManager[None]:
        """Inside the forward of a step it is no compute of the samples."""
        return self._timer.standing_still() if self._in_step else nullcontext()


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
