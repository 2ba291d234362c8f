"""What an id map tells about itself: counts of what happened to ids, and how far they live from home."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

COUNTS = ("asked", "hits", "inserts", "evictions", "collisions", "not_admitted")
"""asked = hits + inserts + collisions + not_admitted; an eviction is part of an insert.

A collision is an id that had to share a row because its window was full: the true ones, and all of them.
"""

_NEARLY_FULL = 0.9
_MANY_COLLISIONS = 0.001


def histogram(values: Tensor) -> dict[str, int]:
    """Numbers from 0 on, counted in ranges that double: 0, 1, 2-3, 4-7, ...; the same on every device."""
    if values.numel() == 0:
        return {}
    # Compared with whole numbers: on a GPU, the logarithm of 8 to base 2 is a little less than 3.
    starts = 1 << torch.arange(63, device=values.device)
    sizes = torch.bucketize(values.long(), starts, right=True)
    counts = torch.bincount(sizes).tolist()
    return {_range_name(size): count for size, count in enumerate(counts) if count}


def merged(parts: list[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several histograms, in ascending order of the ranges."""
    names = sorted({name for part in parts for name in part}, key=lambda name: int(name.split("-")[0]))
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def advice(*, occupancy: float, counts: Mapping[str, int], section: str = "embedding") -> str | None:
    """A warning when a table runs full, or None; `section` of a recipe has its keys."""
    kept = f"; rows of the last {section}.guard steps are never taken over"
    or_let_go = f", or let ids go by {section}.eviction{kept}"
    share = counts["collisions"] / max(1, counts["asked"])
    if share > _MANY_COLLISIONS:
        return (
            f"{share:.2%} of the ids had to share a row ({occupancy:.0%} of the slots are taken): "
            f"raise {section}.rows{or_let_go if not counts['evictions'] else kept}; "
            "`freescale plan ids` tells how many rows"
        )
    if occupancy > _NEARLY_FULL and counts["evictions"] == 0:
        return (
            f"{occupancy:.0%} of the slots are taken: soon ids will share rows; "
            f"raise {section}.rows{or_let_go}"
        )
    return None


def _range_name(size: int) -> str:
    low, high = (0, 0) if size == 0 else (1 << (size - 1), (1 << size) - 1)
    return str(low) if low == high else f"{low}-{high}"
