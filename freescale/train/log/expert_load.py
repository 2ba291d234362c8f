"""How evenly a run uses its experts: counted in every step over all ranks, balanced by it, told in the log.

Counts travel with the loss of the step, in one sum over the ranks. From the summed counts every rank moves the same
router biases by the same bits: balancing follows the one curve. No device waits for the counts of a step: they move
biases two steps later, on every device and any number of ranks. The log gets a fixed number of fields, however many
layers and experts there are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from freescale.balance import StepPlan
from freescale.model import EXTRAS, moe_layers, nan_error
from freescale.pipeline import ReadyBatch

LATE = 2
"""Steps from the one that is counted to the first whose routers know: a step is reported behind the next one at the
latest. With three, loads of small models were a fifth less even; with two as with one."""


class ExpertLoad:
    """Counts tokens of every expert and hands the counts back to the routers. Implements StepExtension.

    Does nothing without MoE layers.

    Args:
        model: the dense part.
    """

    name = "experts"

    def __init__(self, model: nn.Module) -> None:
        self._layers = dict(moe_layers(model))
        self._sizes = [layer.num_experts + len(EXTRAS) for layer in self._layers.values()]
        self._since = [torch.zeros(layer.num_experts, dtype=torch.float64) for layer in self._layers.values()]
        self._global_tokens: Tensor | None = None
        self._counted = torch.zeros(LATE, sum(self._sizes), dtype=torch.float64)
        self._of_step = torch.full((LATE,), -1)
        """Counts over all ranks that no router knows of yet, and of which step they are: each at its number % LATE."""

    @property
    def acts(self) -> bool:
        """Where there are experts: routers choose by the counts of the step before the last."""
        return bool(self._layers)

    def begin(self, ready: ReadyBatch) -> None:
        """A step begins; losses of routers are divided by the same count as every other loss."""
        if not self._layers:
            return
        self._rebalance(ready.plan.step)
        for layer in self._layers.values():
            if self._global_tokens is None:  # one place for all of them, where the first one is by now
                self._global_tokens = torch.ones((), dtype=torch.float64, device=layer.w_in.device)
            layer.global_tokens = self._global_tokens
        if self._global_tokens is not None:
            self._global_tokens.fill_(max(1, ready.plan.global_tokens))

    def _rebalance(self, step: int) -> None:
        place = step % LATE
        if self._of_step[place] != step - LATE:
            return
        for layer, tally in zip(self._layers.values(), self._counted[place].split(self._sizes)):
            layer.router.rebalance(tally)
        self._of_step[place] = -1

    def counts(self, step: int) -> Tensor:
        """What this rank's tokens did since the last call, to be summed over the ranks; may be empty."""
        if not self._layers:
            return torch.zeros(0, dtype=torch.float64)
        return torch.cat([layer.router.take_tally() for layer in self._layers.values()])

    def check(self, counts: Tensor) -> None:
        """Raise where a router got tokens it cannot route; for a step whose loss is not finite."""
        for name, tally in zip(self._layers, counts.split(self._sizes)):
            if tally[-1] > 0:
                raise nan_error(int(tally[-1]), where=f" of {name}")

    def fields(self, summed: Tensor, plan: StepPlan) -> dict[str, float]:
        """Keep the counts of the whole step for the routers; returns the fields of its log line."""
        if not self._layers:
            return {}
        self._counted[plan.step % LATE] = summed
        self._of_step[plan.step % LATE] = plan.step
        tallies = summed.split(self._sizes)
        for layer, since, tally in zip(self._layers.values(), self._since, tallies):
            since += tally[: layer.num_experts]
        extras = sum(tally[-len(EXTRAS) :] for tally in tallies) / (max(1, plan.global_tokens) * len(tallies))
        aux, z, *_ = extras.tolist()
        loads = [tally[: -len(EXTRAS)] for tally in tallies]
        return {**load_fields(loads), "expert_aux": aux, "expert_z": z}

    def picture(self) -> dict[str, Any] | None:
        """The same since the last picture, with the tokens of every expert; None without MoE layers."""
        if not self._layers:
            return None
        tokens = {name: [int(n) for n in since.tolist()] for name, since in zip(self._layers, self._since)}
        fields = load_fields(self._since)
        for since in self._since:
            since.zero_()
        return {**fields, "tokens_per_expert": tokens}

    def state_dict(self) -> dict[str, Tensor]:
        """What routers do not know of yet; their biases are buffers of the model."""
        return {"counted": self._counted, "of_step": self._of_step} if self._layers else {}

    def restored(self) -> None:
        """Nothing to bring in line."""


def lengths_of_split_experts(model: nn.Module) -> dict[str, int]:
    """Parameters of experts that are spread over the ranks: by name, how many experts there are over all ranks."""
    return {
        f"{name}.{part}": layer.num_experts
        for name, layer in moe_layers(model)
        if layer.dispatch.is_split
        for part in ("w_in", "w_out")
    }


def load_fields(counts: list[Tensor]) -> dict[str, float]:
    """The worst layer's load: tokens of its fullest expert over the mean, and entropy (1 = even); experts unused."""
    return {
        "expert_max": max(_max_over_mean(one) for one in counts),
        "expert_entropy": min(_entropy(one) for one in counts),
        "expert_dead": sum(int((one == 0).sum()) for one in counts),
    }


def _max_over_mean(counts: Tensor) -> float:
    total = counts.sum().item()
    return counts.max().item() * len(counts) / total if total else 1.0


def _entropy(counts: Tensor) -> float:
    """Of the shares, over its largest possible value."""
    if len(counts) == 1 or not counts.sum():
        return 1.0
    shares = counts / counts.sum()
    return float(-torch.xlogy(shares, shares).sum() / math.log(len(counts)))
