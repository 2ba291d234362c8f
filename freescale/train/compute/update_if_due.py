"""UpdateIfDue: updates of weights that can be recorded as CUDA graphs and yet be left out of a replay.

Whether they are due stands in a number on the device, which they read there. The library's fused AdamW knows such a
number: a scaler of gradients says by it that one was infinite, and weights and moments are left as they are. Called
part by part it would count every weight's updates before and take that back behind it, a kernel each, a few
microseconds a layer; here all are counted at once, and a layer is one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class UpdateIfDue:
    """Updates weights of an optimizer part by part, if that is due: `count` those of all parts, then `run` each.

    Args:
        optimizer: of the weights; one that is not the library's fused AdamW cannot leave an update out (`possible`).
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.possible = type(optimizer) is torch.optim.AdamW and all(
            group["fused"] and not (group["amsgrad"] or group["maximize"]) for group in optimizer.param_groups
        )
        first = optimizer.param_groups[0]["params"][0]
        self._due = torch.zeros((), dtype=torch.float32, device=first.device)
        self._left_out = torch.ones_like(self._due)
        self._is_due = False

    def tell(self, due: bool) -> None:
        """Whether updates that are replayed from now on are due."""
        if due != self._is_due:
            self._due.fill_(due)
            self._left_out.fill_(not due)
            self._is_due = due

    def knows(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether all were updated before: moments that a recording makes would be made in every replay anew."""
        return all(self._optimizer.state.get(param) for param in params)

    @torch.no_grad()
    def count(self, params: Iterable[nn.Parameter]) -> None:
        """One more update of each of these weights, which all have moments."""
        steps = [self._optimizer.state[param]["step"] for param in params]
        torch._foreach_add_(steps, [self._due] * len(steps))

    @torch.no_grad()
    def run(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Update these weights, each with its gradient; they were counted."""
        for group in self._optimizer.param_groups:
            own = [param for param in group["params"] if param in gradients]
            if not own:
                continue
            states = [self._optimizer.state[param] for param in own]
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                own,
                [gradients[param] for param in own],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=self._left_out,
            )


@torch.no_grad()
def update_only(optimizer: torch.optim.Optimizer, gradients: Mapping[nn.Parameter, Tensor]) -> None:
    """A step of these weights and no others: whatever gradients lie in `.grad` stay there."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [(param, param.grad) for param in params]
    for param in params:
        param.grad = gradients.get(param)
    try:
        # As at the end of a step, where nothing is computed in half precision.
        with torch.autocast(params[0].device.type, enabled=False):
            optimizer.step()
    finally:
        for param, grad in before:
            param.grad = grad
