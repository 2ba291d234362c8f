"""RequestView: requests with candidates behind their histories, as encoders see them.

A candidate sees the history as the mask says, and itself; all candidates of a request stand at one position, the first
after the history. So k candidates in one pass are k passes with one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.errors import ConfigError
from freescale.jagged import spans
from freescale.kernels import AttentionMask, MaskKind, SequenceLayout
from freescale.kernels.runtime import to_device
from freescale.model.parts.dropout import dropout_batch
from freescale.model.views.view import BatchView


class RequestView(BatchView):
    """All tokens of requests: events, and behind them candidates.

    Args:
        batch: whose `targets` says how many candidates each sequence has.
        layout: the batch's layout.
        mask: what is seen beside that; must be an `AttentionMask`.
    """

    def __init__(self, batch: SequenceBatch, layout: SequenceLayout, *, mask: AttentionMask) -> None:
        super().__init__(batch, layout, mask=mask)
        self._own_mask = mask

    @cached_property
    def positions(self) -> Tensor:
        """[T] position of each token in its own sequence; all candidates of a request have one."""
        return torch.minimum(self._layout.positions, self.ends)

    @cached_property
    def ends(self) -> Tensor:
        """[T] the position that the candidates of each token's request have."""
        return self._of_sequences(self._layout.lengths - self._counts)

    @property
    def one_candidate(self) -> bool:
        """Whether no request has several: what a token sees is then what stands before it."""
        mask = self._own_mask
        plain = mask.window is None and mask.prefix == 0 and mask.segments is None
        return plain and bool(self._counts.max(initial=0) <= 1)

    @cached_property
    def target_index(self) -> Tensor:
        """[K] the candidates among the tokens of the batch."""
        counts = self._counts
        index, _ = spans(self._layout.offsets.numpy()[1:] - counts, counts)
        return to_device(index, device=self._layout.device)[0]

    @cached_property
    def only_targets(self) -> BatchView:
        """The same for a last layer: events see nothing, and cost nothing."""
        return BatchView(self._batch, self._layout, mask=replace(self._own_mask, only_targets=True))

    @property
    def _counts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self._own_mask.target_counts(len(self._layout.lengths))


def request_view(batch: SequenceBatch, layout: SequenceLayout, kind: MaskKind | None) -> RequestView:
    """What encoders see of requests, under the mask that `kind` makes for them.

    Raises:
        ConfigError: the batch has no candidates, or the mask is not one that knows them.
    """
    if batch.targets is None:
        raise ConfigError(
            "a batch of requests must say how many candidates each of them has",
            got="SequenceBatch without targets",
            next_step="SequenceBatch(..., targets=counts), or data from `RequestExamples`",
        )
    own = None if kind is None else kind.for_batch(batch.tokens, layout)
    if own is not None and not isinstance(own, AttentionMask):
        raise ConfigError(
            "model.mask cannot be used with candidates: it does not know them",
            got=type(own).__name__,
            allowed="causal, window",
        )
    mask = AttentionMask(targets=batch.targets) if own is None else replace(own, targets=batch.targets)
    return RequestView(batch, layout, mask=mask)


def target_states(
    encoder: object, vectors_TD: Tensor, batch: SequenceBatch, layout: SequenceLayout
) -> Tensor:
    """State of every candidate of a batch, [K, D]; by a short last layer where the encoder has one.

    Raises:
        ConfigError: the encoder has no `encode(vectors, view)`.
    """
    view = request_view(batch, layout, getattr(encoder, "mask", None))
    short = getattr(encoder, "encode_targets", None)
    if short is not None:
        states: Tensor = short(vectors_TD, view)
        return states
    encode = getattr(encoder, "encode", None)
    if encode is None:
        raise ConfigError(
            "this encoder cannot see candidates",
            got=f"{type(encoder).__name__} without encode(vectors, view)",
            next_step="freescale/model/views/view.py says how to write it, or take candidates late",
        )
    every: Tensor = encode(vectors_TD, view)
    return every.index_select(0, view.target_index)


def history_states(encoder: Any, vectors_TD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> Tensor:
    """State of the last event for every candidate of a batch, [K, D]; zeros for a request without history."""
    counts = batch.lengths - view_counts(batch)
    index, events = batch.part(torch.zeros_like(counts), counts, device=vectors_TD.device)
    offsets = events.offsets
    own = SequenceLayout(offsets, device=layout.device)
    with dropout_batch(events, own):
        states = encoder(vectors_TD.index_select(0, index), events, own)
    # Behind the events a row of zeros, for those without any.
    padded = torch.cat([states, states.new_zeros(1, states.shape[1])])
    last = torch.where(counts > 0, offsets[1:] - 1, int(offsets[-1])).repeat_interleave(view_counts(batch))
    return padded.index_select(0, to_device(last.numpy(), device=states.device)[0])


def view_counts(batch: SequenceBatch) -> Tensor:
    """[B] candidates of each request."""
    assert batch.targets is not None
    return batch.targets
