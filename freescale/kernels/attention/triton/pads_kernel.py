"""Triton kernel that clears what belongs to the pads of a batch, and nothing else."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def clear_pads_kernel(
    Offsets, Out, num_sequences, num_tokens, ROW: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Zeros from the end of the last sequence, which the device knows alone, to the end of the tensor."""
    begin = tl.load(Offsets + num_sequences) * ROW
    end = num_tokens.to(tl.int64) * ROW
    for first in range(begin + tl.program_id(0) * BLOCK, end, PROGRAMS * BLOCK):
        places = first + tl.arange(0, BLOCK)
        tl.store(Out + places, 0.0, mask=places < end)
