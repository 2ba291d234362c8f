"""Parts of a layer that is one function of autograd: each keeps for its gradients what it keeps alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from freescale.kernels.hstu.parts import GradBuffer


class KeptPart:
    """What a part keeps for its gradients; to the part it is autograd's context."""

    room: GradBuffer

    def __init__(self) -> None:
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """As autograd's context does, until what is kept is handed over to that."""
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Nothing: what a part writes over is another part's own."""


def given_back(ctx: Any) -> list[KeptPart]:
    """The parts with what they keep, for this call alone: the graph may be gone through again."""
    tensors, found, end = ctx.saved_tensors, [], 0
    for part, count in zip(ctx.parts, ctx.counts):
        own = KeptPart()
        own.__dict__.update(part.__dict__)
        own.saved_tensors, end = tensors[end : end + count], end + count
        found.append(own)
    return found
