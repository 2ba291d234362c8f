"""SegmentedEncoder: any encoder over histories that are compressed into summary tokens, trained in one masked pass.

The summaries are the only way from one segment to the next, so what a later event knows of a segment is what its
summaries hold: their keys and values can be kept and the segment forgotten (`compressor.py`). The idea is PerSRec's
(arXiv 2601.03479). The vectors of the summaries are learnt and the same for all users; what is personal is what the
layers make of them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from freescale.data import SegmentedBatch, SegmentRule, SequenceBatch, insert_summaries
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.model.parts.dropout import dropout_batch
from freescale.model.views.view import BatchView, KeepKeys, ViewEncoder


class SegmentedEncoder(nn.Module):
    """States of the events of whole histories, as if each segment but its own reached an event as summaries only.

    From outside it is an encoder like any other: one vector an event goes in, one state an event comes out. So losses,
    targets and negatives know of events only; a summary has no target, and the last event of a segment has the event
    after the summaries.

    Args:
        encoder: the encoder inside, with room for `max_positions` tokens.
        rule: how histories are cut.
        dim: width of vectors and states.
        max_positions: most events and summaries of one sequence.
    """

    compresses = True

    def __init__(self, encoder: nn.Module, *, rule: SegmentRule, dim: int, max_positions: int) -> None:
        super().__init__()
        if getattr(encoder, "mask", None) is not None:
            raise ConfigError(
                "model.mask and segments.recent do not go together: summaries bring a mask of their own",
                next_step="leave out model.mask, or segments.recent",
            )
        self.encoder = encoder
        self.rule = rule
        self.max_positions = max_positions
        self.summaries = nn.Parameter(torch.empty(rule.summaries, dim))
        # As item vectors begin.
        nn.init.trunc_normal_(self.summaries, std=0.02)

    def forward(self, vectors_TD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> Tensor:
        """State of every event, [T, D]; `layout` is that of the events alone, and not needed here."""
        cut = insert_summaries(
            batch,
            self.rule.cut(batch.lengths.numpy()),
            summaries=self.rule.summaries,
            device=vectors_TD.device,
        )
        return self.masked_pass(vectors_TD, cut).index_select(0, cut.events)

    def masked_pass(self, vectors_TD: Tensor, cut: SegmentedBatch, *, keep: KeepKeys | None = None) -> Tensor:
        """State of every event and summary; `keep` is handed the keys and values of every layer."""
        layout = SequenceLayout(cut.batch.offsets, device=vectors_TD.device)
        view = BatchView(cut.batch, layout, mask=cut.mask, keep=keep)
        with dropout_batch(cut.batch, layout):
            return self.inner.encode(self.with_summaries(vectors_TD, cut), view)

    def with_summaries(self, vectors_TD: Tensor, cut: SegmentedBatch) -> Tensor:
        """Vectors of events and summaries in their places."""
        num_segments = len(cut.summaries) // self.rule.summaries
        # Copied and summed in a fixed order, also backwards: a gather of shared rows would add by atomics on a GPU.
        shared = self.summaries.expand(num_segments, -1, -1).flatten(0, 1).to(vectors_TD.dtype)
        return cast(Tensor, _Insert.apply(vectors_TD, shared, cut.events, cut.summaries))  # type: ignore[no-untyped-call]

    @property
    def inner(self) -> ViewEncoder:
        """The encoder inside, as passes see it."""
        return cast(ViewEncoder, self.encoder)


class _Insert(torch.autograd.Function):
    """Rows of two tensors, each in its own places of one: each is written once, and read once in the backward."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, shared: Tensor, events: Tensor, summaries: Tensor) -> Tensor:
        ctx.save_for_backward(events, summaries)
        room = vectors.new_empty(len(events) + len(summaries), vectors.shape[1])
        return room.index_copy_(0, events, vectors).index_copy_(0, summaries, shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        events, summaries = ctx.saved_tensors
        return grads[0].index_select(0, events), grads[0].index_select(0, summaries), None, None
