"""How evenly a run uses its experts: counted in every step over all ranks, balanced by it, told in the log.

Counts travel with the loss of the step, in one sum over the ranks. From the summed counts every rank moves the same
router biases by the same bits: balancing follows the one curve. The log gets a fixed number of fields, however many
layers and experts there are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from freescale.model import EXTRAS, moe_layers, nan_error


class ExpertLoad:
    """Counts tokens of every expert and hands the counts back to the routers; does nothing without MoE layers.

    Args:
        model: the dense part.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = dict(moe_layers(model))
        self._sizes = [layer.num_experts + len(EXTRAS) for layer in self._layers.values()]
        self._since = [torch.zeros(layer.num_experts, dtype=torch.float64) for layer in self._layers.values()]

    @property
    def balances(self) -> bool:
        """Whether there are experts, so that a step depends on the counts of the one before."""
        return bool(self._layers)

    def begin(self, global_tokens: int) -> None:
        """A step begins; losses of routers are divided by the same count as every other loss."""
        for layer in self._layers.values():
            layer.global_tokens = global_tokens

    def take(self) -> Tensor:
        """What this rank's tokens did since the last call, to be summed over the ranks; may be empty."""
        if not self._layers:
            return torch.zeros(0, dtype=torch.float64)
        return torch.cat([layer.router.take_tally() for layer in self._layers.values()])

    def check(self, taken: Tensor) -> None:
        """Raise where a router got tokens it cannot route; for a step whose loss is not finite."""
        for name, tally in zip(self._layers, taken.split(self._sizes)):
            if tally[-1] > 0:
                raise nan_error(int(tally[-1]), where=f" of {name}")

    def rebalance(self, summed: Tensor, *, global_tokens: int) -> dict[str, float]:
        """Give the routers the counts of the whole step; returns the fields of its log line."""
        if not self._layers:
            return {}
        tallies = summed.split(self._sizes)
        for layer, since, tally in zip(self._layers.values(), self._since, tallies):
            layer.router.rebalance(tally)
            since += tally[: layer.num_experts]
        extras = sum(tally[-len(EXTRAS) :] for tally in tallies) / (max(1, global_tokens) * len(tallies))
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
