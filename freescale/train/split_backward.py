"""SplitBackward: gradients of rows first, gradients of weights while those travel, then one sum over the ranks.

    forward, backward of inputs ┃ rows' gradients leave ┃ gradients of weights ┃ sum over ranks ┃ update
                                └──── OL gradients home, applied, OL rows back (pipeline/urgent_chain.py) ────>

Every layer whose weights can wait (`kernels/runtime/postponed.py`) leaves them; any other module is differentiated as
always. The gradients are the same to the bit. A sum over the ranks cannot begin before a gradient is there, so DDP,
which sums under the backward, is not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from freescale.comm.traffic import Gate
from freescale.comm.world import Ranks
from freescale.kernels.runtime import PostponedGradients
from freescale.trace import compute
from freescale.train.dense_gradients import FlatSum
from freescale.train.log.timer import StepTimer


class SplitBackward:
    """Puts gradients of weights off, computes them when told, and adds all dense gradients up over the ranks.

    Args:
        parameters: those of which every rank has a gradient of its own.
        most_bytes: what is kept for gradients that are put off may take.
        total: adds up over the ranks; None on one rank.
        timer: of the step.
    """

    outlast_backward = True

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        most_bytes: int,
        total: FlatSum | None,
        timer: StepTimer,
    ) -> None:
        self._parameters = [param for param in parameters if param.requires_grad]
        self.postponed = PostponedGradients(most_bytes=most_bytes)
        self._total, self._timer = total, timer

    def taking(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; only the last one has anything to hide."""
        return self.postponed.taking() if last else nullcontext()

    def compute(self) -> None:
        """The gradients that were put off."""
        with compute("weight gradients"), self._timer.later_part():
            self.postponed.compute()

    def wait(self) -> None:
        """Add up over the ranks; gradients are then in their `.grad`."""
        if self._total is None:
            return
        self._timer.handed_over()
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for param in self._parameters:
            by_type.setdefault(param.dtype, []).append(param)
        for params in by_type.values():
            flat = torch.cat([_gradient(param).flatten() for param in params])
            self._total.start(flat)
            self._total.wait()
            for param, grad in zip(params, flat.split([param.numel() for param in params])):
                param.grad = grad.view_as(param)


def _gradient(param: nn.Parameter) -> Tensor:
    """Its own, or zeros on a rank that has none."""
    return torch.zeros_like(param) if param.grad is None else param.grad


def sum_of_all(ranks: Ranks, *, kind: str, gate: Gate | None) -> FlatSum | None:
    """What adds gradients up over these ranks; nothing where there is only one."""
    if ranks.group is None:
        return None
    return FlatSum(ranks.group, ranks.device, kind=kind, gate=gate, timeout_s=ranks.timeout_s)
