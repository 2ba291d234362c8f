"""Masks of segments and summaries as sequences without a mask, for the ways to compute that know none.

A token of a segment sees the summaries of earlier segments and its own segment up to itself. So each segment becomes a
sequence of its own, those summaries in front: exactly what is seen is computed, and the few rows of summaries that
come out again are dropped. Distances are those between the original positions.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from freescale.jagged import group_index, number_inside, offsets_of
from freescale.kernels.attention.cpu.loop_attention import LoopLayout
from freescale.kernels.attention.cpu.tile_layout import TileLayout
from freescale.kernels.attention.mask import AttentionMask


def can_unroll(mask: AttentionMask, offsets: Tensor) -> bool:
    """Whether a mask is of segments only, each of them in one piece."""
    if mask.segments is None or mask.window is not None or mask.prefix or mask.targets is not None:
        return False
    assert mask.runs is not None
    starts = offsets.numpy()
    if mask.runs.starts.max(initial=0) >= max(1, starts[-1]):
        return False
    pieces = mask.runs.within(starts)
    falls = np.diff(pieces.segment, prepend=0) < 0
    return not (falls & ~np.isin(pieces.starts, starts)).any()


class SegmentRuns:
    """A batch under such a mask, rewritten.

    Args:
        mask: segments and perhaps summaries.
        offsets: [B + 1] of the sequences, on the CPU.
    """

    def __init__(self, mask: AttentionMask, offsets: Tensor) -> None:
        assert mask.runs is not None
        starts = offsets.numpy()
        pieces = mask.runs.within(starts)
        ends = np.append(pieces.starts[1:], starts[-1])
        first = starts[np.searchsorted(starts, pieces.starts, side="right") - 1]
        # Runs begin where a sequence or a segment does.
        fresh = (pieces.starts == first) | (np.diff(pieces.segment, prepend=-1) != 0)
        begins, first = pieces.starts[fresh], first[fresh]
        lengths = np.append(begins[1:], starts[-1]) - begins if len(begins) else begins
        piece, inside = group_index((ends - pieces.starts)[pieces.summary])
        of_summaries = pieces.starts[pieces.summary][piece] + inside
        early = np.searchsorted(of_summaries, first)
        before = np.searchsorted(of_summaries, begins) - early
        run, number = group_index(before + lengths)
        flat = begins[run] + number - before[run]
        is_early = number < before[run]
        flat[is_early] = of_summaries[(early[run] + number)[is_early]]
        position = number_inside(np.diff(starts))
        self.index = torch.from_numpy(flat)
        self.own = torch.from_numpy(np.flatnonzero(~is_early))
        runs = torch.from_numpy(offsets_of(before + lengths))
        self.loops = LoopLayout(runs, positions=position[flat])
        self._offsets = runs

    @cached_property
    def tiles(self) -> TileLayout:
        """The batch for batched products."""
        return TileLayout(self._offsets)
