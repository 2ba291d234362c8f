"""Triton kernel that adds up parts which lie one after the other, and writes the sum as often as it is to be sent."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def sum_parts_kernel(Parts, Sums, count, PARTS: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """In the order of the parts: the bits are those of one addition after the other."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    width = count.to(tl.int64)
    total = tl.load(Parts + places, mask=inside, other=0.0)
    for part in range(1, PARTS):
        total += tl.load(Parts + part * width + places, mask=inside, other=0.0)
    for copy in range(COPIES):
        tl.store(Sums + copy * width + places, total, mask=inside)
