"""Masks of segments and summaries as sequences without a mask, for the ways to compute that know none.

A token of a segment sees the summaries of earlier segments and its own segment up to itself. So each segment becomes a
sequence of its own, those summaries in front: exactly what is seen is computed, and the few rows of summaries that
come out again are dropped. Distances are those between the original places.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.attention_mask import AttentionMask
from freescale.kernels.loop_attention import LoopLayout
from freescale.kernels.tile_layout import TileLayout


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
        assert mask.segments is not None
        starts = offsets.numpy()
        segments = mask.segments.cpu().numpy()
        summaries = np.zeros(len(segments), bool)
        if mask.summaries is not None:
            summaries = mask.summaries.cpu().numpy().astype(bool)
        place = np.arange(len(segments)) - np.repeat(starts[:-1], np.diff(starts))
        begins = np.flatnonzero((place == 0) | (np.diff(segments, prepend=-1) != 0))
        of_summaries = np.flatnonzero(summaries)
        pieces, own, sizes, done = [], [], [], 0
        for begin, end in zip(begins, np.append(begins[1:], len(segments))):
            first, last = np.searchsorted(of_summaries, [begin - place[begin], begin])
            piece = np.concatenate([of_summaries[first:last], np.arange(begin, end)])
            pieces.append(piece)
            own.append(np.arange(done + last - first, done + len(piece)))
            sizes.append(len(piece))
            done += len(piece)
        flat = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
        self.index = torch.from_numpy(flat)
        self.own = torch.from_numpy(np.concatenate(own) if own else flat)
        runs = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int64)
        self.loops = LoopLayout(runs, places=place[flat])
        self._offsets = runs

    @cached_property
    def tiles(self) -> TileLayout:
        """The batch for batched products."""
        return TileLayout(self._offsets)
