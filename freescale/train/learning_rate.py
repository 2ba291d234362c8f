"""Learning rate as a function of the step: linear warm-up, then constant or cosine."""

from __future__ import annotations

import math


def lr_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """What the base learning rate is multiplied with in this step (counted from 0)."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
