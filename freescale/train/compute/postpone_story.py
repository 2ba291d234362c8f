"""What is told at the end of a run of weight gradients that were to wait."""

from __future__ import annotations

from freescale.kernels.runtime import PostponedGradients

_MIB = 1 << 20


def postpone_story(postponed: PostponedGradients) -> str | None:
    """What was kept for them, and how many had no room; None where none was to wait."""
    without = postponed.num_without_room
    total = without + postponed.num_postponed
    if not postponed.wanted_bytes or not total:
        return None
    told = f"postponed weight gradients kept up to {postponed.most_kept_bytes / _MIB:,.0f} MiB"
    if not without:
        return told
    whose = "they were given (pipeline.postpone_mb)"
    if postponed.most_bytes < postponed.wanted_bytes:
        whose = "that replays leave them"
    bound = f"the {postponed.most_bytes / _MIB:,.0f} MiB {whose}"
    return (
        f"{told}; {without / total:.0%} were computed at once: what they are made of is too large for {bound}"
    )
