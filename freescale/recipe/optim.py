"""The optimizer of the dense part, and the learning rate of everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from freescale.recipe.reading.keys import key

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from freescale.model import Recommender
    from freescale.recipe.config import Config


@dataclass(frozen=True, kw_only=True)
class OptimSection:
    """AdamW for the dense parameters."""

    lr: float = key(1e-3, "learning rate", at_least=0)
    weight_decay: float = key(0.0, "AdamW weight decay", at_least=0)
    beta1: float = key(0.9, "decay of the first moment", at_least=0, at_most=0.999999)
    beta2: float = key(0.98, "decay of the second moment", at_least=0, at_most=0.999999)
    schedule: Literal["constant", "cosine"] = key("constant", "shape of the learning rate after warm-up")
    warmup_steps: int = key(0, "steps of linear warm-up", at_least=0)
    clip_norm: float | None = key(None, "clip the global norm of the dense gradients", at_least=0)
    accumulate: int = key(
        1, "micro-batches a step (less activation memory, same curve)", at_least=1, free=True
    )


def problems(config: Config) -> list[str]:
    """Every mistake in these keys shows in one key alone."""
    return []


def build_optimizer(config: Config, model: Recommender, device: torch.device) -> torch.optim.Optimizer:
    """AdamW for the dense part; on a GPU one kernel moves all parameters, for starting many takes the time."""
    import torch

    optim = config.optim
    return torch.optim.AdamW(
        model.parameters(),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        weight_decay=optim.weight_decay,
        fused=True if device.type == "cuda" else None,
    )


def learning_rate(config: Config, *, total_steps: int) -> Callable[[int], float]:
    """(step) -> what multiplies the learning rates of the dense part and of the table."""
    from freescale.train import lr_factor

    optim = config.optim

    def factor(step: int) -> float:
        return lr_factor(
            step, schedule=optim.schedule, warmup_steps=optim.warmup_steps, total_steps=total_steps
        )

    return factor
