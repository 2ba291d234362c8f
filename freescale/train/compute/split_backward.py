"""SplitBackward: gradients of rows first, gradients of weights while those travel, then sums over the ranks.

    forward, backward of inputs ┃ rows' gradients leave ┃ gradients of weights ┃ next forward, layer by layer
                                │                       └── sums, piece by piece, as gradients are there ──>
                                └──── OL gradients home, applied, OL rows back (prioritized/urgent_chain.py) ────>

Every layer whose weights can wait (`kernels/runtime/postponed.py`) leaves them; any other module is differentiated as
always. The gradients are the same to the bit. A sum over the ranks cannot begin before a gradient is there, so DDP,
which sums under the backward, is not used: gradients are cut into pieces in the order of the model, and where a sum can
be under way beside other work each piece leaves as soon as it is complete. Nobody waits for them then: the weights of a
layer are updated when the next forward reaches it (`late_update.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from freescale.balance import bucket_bytes
from freescale.comm.traffic import Gate
from freescale.comm.world import Ranks
from freescale.kernels.runtime import PostponedGradients
from freescale.trace import compute
from freescale.train.accounts.timer import StepTimer
from freescale.train.compute.dense_gradients import FlatSum, in_pieces
from freescale.train.compute.late_update import LateUpdate, Piece


class SplitBackward:
    """Puts gradients of weights off, computes them when told, and adds all dense gradients up over the ranks.

    Args:
        parameters: those of which every rank has a gradient of its own.
        most_bytes: what is kept for gradients that are put off may take.
        total: adds up over the ranks; None on one rank.
        timer: of the step.
        late: updates weights when they are needed; at the end of the step unless given.
    """

    outlast_backward = True

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        most_bytes: int,
        total: FlatSum | None,
        timer: StepTimer,
        late: LateUpdate | None = None,
    ) -> None:
        self.postponed = PostponedGradients(most_bytes=most_bytes)
        self._total, self._timer = total, timer
        self._late = late if total is not None and total.only_starts else None
        learnt = [param for param in parameters if param.requires_grad]
        self._pieces = _pieces(learnt, total, late)
        self._under_way: list[Piece] = []

    def taking(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; only the last one has anything to hide."""
        return self.postponed.taking() if last else nullcontext()

    def compute(self) -> None:
        """The gradients that were put off."""
        # By identity: weights are not hashed by what they hold.
        waiting = {id(weight) for weight in self.postponed.waiting}

        def done(weight: Tensor) -> None:
            waiting.discard(id(weight))
            self._start(waiting)

        with compute("weight gradients"), self._timer.later_part():
            if self._total is not None and self._total.only_starts:
                self._start(waiting)
                self.postponed.compute(done)
            else:
                self.postponed.compute()

    def wait(self) -> None:
        """Add up over the ranks what is not under way; gradients are then in their `.grad`."""
        if self._total is None:
            return
        self._start(set())
        self._total.wait()
        under_way, self._under_way = self._under_way, []
        for param, grad in (each for piece in under_way for each in piece.gradients()):
            param.grad = grad

    def leave(self, *, lr: float) -> bool:
        """Instead of waiting, leave what is under way to the next forward, where that is possible."""
        if self._late is None or self._total is None:
            return False
        self._start(set())
        self._total.forget()
        under_way, self._under_way = self._under_way, []
        for piece in under_way:
            self._late.leave(piece, lr=lr)
        return True

    def _start(self, waiting: set[int]) -> None:
        """Send the next pieces, in their order, up to one that is not complete: every rank starts the same ones."""
        if self._total is None:
            return
        for params in self._pieces[len(self._under_way) :]:
            if any(id(param) in waiting for param in params):
                return
            flat = torch.cat([_gradient(param).flatten() for param in params])
            arrival = self._timer.handed_over()
            self._under_way.append(Piece(params, flat, self._total.start(flat), arrival))


def _pieces(
    parameters: list[nn.Parameter], total: FlatSum | None, late: LateUpdate | None
) -> list[list[nn.Parameter]]:
    """The same on every rank: by type, in the order of the model, lowest layers first; one where a start is a wait."""
    ordered = parameters if late is None else late.in_order(parameters)
    kinds = list(dict.fromkeys(param.dtype for param in ordered))
    most = bucket_bytes(sum(param.nbytes for param in ordered))
    parts = total is not None and total.only_starts
    return in_pieces(
        sorted(ordered, key=lambda param: kinds.index(param.dtype)),
        most if parts else math.inf,
        None if late is None else late.unit_of,
    )


def _gradient(param: nn.Parameter) -> Tensor:
    """Its own, or zeros on a rank that has none."""
    return torch.zeros_like(param) if param.grad is None else param.grad


def sum_of_all(ranks: Ranks, *, kind: str, sums: str, gate: Gate | None) -> FlatSum | None:
    """What adds gradients up over these ranks; nothing where there is only one."""
    if ranks.group is None:
        return None
    return FlatSum(ranks.group, ranks.device, kind=kind, sums=sums, gate=gate, timeout_s=ranks.timeout_s)
