"""Where tokens of features stand in padded sequences, worked out on the device, so that a recorded step can do it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freescale.data import TokenRule
from freescale.kernels import SequenceLayout


class PaddedPlaces(NamedTuple):
    """Where the tokens of longer padded sequences come from; of what is no token's, a place that is a pad's.

    Args:
        order: [T'] for each token, its place among all front tokens, feature by feature, then events, then tokens
            behind events, feature by feature.
        back: the other way round; the last token, which is a pad, for what stands nowhere.
        event: [T'] for each token, the event whose times it has.
        last: [T] for each event, the last token that belongs to it.
    """

    order: Tensor
    back: Tensor
    event: Tensor
    last: Tensor


def padded_places(layout: SequenceLayout, longer: SequenceLayout, rule: TokenRule) -> PaddedPlaces:
    """The places of a padded batch, by its offsets on the device alone."""
    starts, longer_starts = layout.device_offsets, longer.device_offsets
    num_samples, num_events, step = len(starts) - 1, layout.num_tokens, 1 + rule.after
    pad = longer.num_tokens - 1
    device = starts.device
    # Of tokens of the longer sequences.
    token = torch.arange(longer.num_tokens, device=device)
    owner, place = longer.sequence_of_token, longer.positions
    number = (place - rule.front).clamp_(min=0)
    event = starts[owner] + torch.div(number, step, rounding_mode="floor")
    real = token < longer_starts[-1]
    event = torch.where(real, event, num_events - 1)
    behind = rule.front * num_samples + number % step * num_events + event
    order = torch.where(real & (place < rule.front), place * num_samples + owner, behind)
    order = torch.where(real, order, rule.front * num_samples + num_events - 1)
    # Of events, and of sequences.
    own = layout.sequence_of_token
    first = longer_starts[own] + rule.front + layout.positions * step
    there = torch.arange(num_events, device=device) < starts[-1]
    used = starts.diff() > 0
    back = torch.cat(
        [
            *(torch.where(used, longer_starts[:-1] + n, pad) for n in range(rule.front)),
            *(torch.where(there, first + n, pad) for n in range(step)),
        ]
    )
    return PaddedPlaces(order, back, event, torch.where(there, first + rule.after, pad))
