"""KeyVisibility: what a mask lets tokens see, token by token, as the Triton kernels read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.kernels.attention.mask import AttentionMask, Ints
from freescale.kernels.runtime import Carrier

# A tile of keys may begin at the last token.
_LARGEST_TILE = 128
MOST_COUNTED = 2**15 - 1
"""Tokens of the longest sequence whose seers are counted in 16 bits."""


class KeyVisibility(NamedTuple):
    """What a mask lets tokens see, as the kernels read it.

    Args:
        kind: "counts": how many tokens, from itself on, see each token. For sequences that are too long, or where a
            segment comes back after another: "codes", the number of its segment twice, and one more for summaries;
            "none" without segments. With " of targets" where other tokens see nothing at all.
        tokens: [T and more] int16 for counts: numbers of 32 bits the compiler fetches ahead, for every thread its own 4
            bytes at a time, and the forward of five segments took as long as that of the whole. Codes are int32.
    """

    kind: str
    tokens: Tensor


def key_visibility(
    mask: AttentionMask,
    starts: Ints,
    segment_ends: tuple[Ints, Ints] | None,
    *,
    carrier: Carrier,
    nothing: Tensor,
) -> KeyVisibility:
    """What a mask lets tokens see.

    Args:
        mask: what it says.
        starts: [B + 1] of the sequences.
        segment_ends: of `TilePlanner`, where segments follow each other.
        carrier: brings tables to the device.
        nothing: stands for a tensor that is not read, where the kernels run.
    """
    in_order = mask.segments is None or segment_ends is not None
    who = " of targets" if mask.only_targets else ""
    if in_order and np.diff(starts).max(initial=0) <= MOST_COUNTED:
        return KeyVisibility("counts" + who, _counts(mask, starts, segment_ends, carrier, nothing.device))
    if mask.segments is None:
        return KeyVisibility("none" + who, nothing)
    codes = mask.segments.to(nothing.device, non_blocking=True).to(torch.int32) * 2
    if mask.summaries is not None:
        codes += mask.summaries.to(nothing.device, non_blocking=True).bool()
    return KeyVisibility("codes" + who, codes)


def _counts(
    mask: AttentionMask,
    starts: Ints,
    segment_ends: tuple[Ints, Ints] | None,
    carrier: Carrier,
    device: torch.device,
) -> Tensor:
    """How many tokens, from itself on, see each token as `AttentionMask` says; a prefix is left to the kernels."""
    num_tokens, lengths = int(starts[-1]), np.diff(starts)
    history = lengths - mask.target_counts(len(lengths))
    per_sequence = (lengths, starts[1:], starts[:-1] + history)
    sizes, ends, targets, *pieces = carrier.add(*per_sequence, *(segment_ends or ()))

    def spread(values: Tensor, counts: Tensor) -> Tensor:
        return torch.repeat_interleave(values, counts, output_size=num_tokens)

    token = torch.arange(num_tokens, device=device)
    end, first_target = spread(ends, sizes), spread(targets, sizes)
    if mask.window is not None:
        seen_by_targets = first_target - token <= mask.window
        if mask.prefix:
            seen_by_targets |= token - (end - spread(sizes, sizes)) < mask.prefix
        end = torch.where(seen_by_targets, end, token + mask.window + 1)
    if pieces:
        segment_end = spread(pieces[1], pieces[0])
        end = torch.where(segment_end < 0, end, torch.minimum(end, segment_end))
    if mask.targets is not None:
        end = torch.where(token < first_target, end, token + 1)
    return F.pad((end - token).to(torch.int16), (0, _LARGEST_TILE))
