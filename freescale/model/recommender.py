"""Recommender: an encoder and a head over one jagged batch and its unique item vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freescale import registry
from freescale.data import SegmentRule, SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import MaskKind, SequenceLayout, Sum, make_mask_kind
from freescale.kernels.rows import take
from freescale.model.compression.segmented import SegmentedEncoder
from freescale.model.encoder import Encoder, EncoderShape
from freescale.model.head import Head
from freescale.model.inputs.context_tokens import ContextTokens
from freescale.model.inputs.feature_tokens import FeatureTokens
from freescale.model.parts.dropout import dropout_batch, number_sites
from freescale.model.views.request_view import history_states, target_states

NO_TABLES: Mapping[str, Tensor] = {}


class Recommender(nn.Module):
    """The dense part of the model. Item vectors come from outside, so that tables can live anywhere.

    Args:
        encoder: states from item vectors (HSTU, SASRec, ...).
        head: loss from states and item vectors.
        items: what computes item vectors, where they are not rows of a table. It is kept here with the rest of the
            dense part, but called by the training step: once for all occurrences of an item.
        tokens: puts features of events and users into the sequences; none unless given.
    """

    def __init__(
        self,
        *,
        encoder: Encoder,
        head: Head,
        items: nn.Module | None = None,
        tokens: FeatureTokens | ContextTokens | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.tokens = tokens
        self.items = items
        number_sites(self)  # encoder and head first: their numbers are the same without items

    def without_items(self) -> Recommender:
        """The same encoder and head, without what computes item vectors: what is exported and served."""
        if self.items is None:
            return self
        return Recommender(encoder=self.encoder, head=self.head, tokens=self.tokens)

    def forward(
        self,
        rows_UD: Tensor,
        batch: SequenceBatch,
        layout: SequenceLayout | None = None,
        tables: Mapping[str, Tensor] = NO_TABLES,
    ) -> Tensor:
        """Sum of the losses of the batch's tokens.

        Args:
            rows_UD: the unique item vectors of the batch.
            batch: carries "item_index" and what the head needs, as indices into `rows_UD`.
            layout: of the batch, if somebody has made it before.
            tables: the unique rows of every table that features of events and users have rows in.
        """
        if layout is None:
            layout = SequenceLayout(batch.offsets, device=rows_UD.device)
        with dropout_batch(batch, layout):
            states, rows_UD = self.encode(rows_UD, batch, layout, tables)
            if batch.learnt is not None:
                index, batch = batch.learnt_part()
                states = states.index_select(0, index)
                layout = SequenceLayout(batch.offsets, device=rows_UD.device)
            if batch.num_tokens == 0 and not is_ours(self.head):
                return states.sum() + rows_UD.sum() * 0 + _nothing(self.head, rows_UD)
            return self.head.loss(states, rows_UD, batch, layout)

    def states(
        self,
        rows_UD: Tensor,
        batch: SequenceBatch,
        layout: SequenceLayout,
        tables: Mapping[str, Tensor] = NO_TABLES,
    ) -> Tensor:
        """State of every token, [T, D]."""
        return self.encode(rows_UD, batch, layout, tables)[0].to(rows_UD.dtype)

    def vectors(
        self, rows_UD: Tensor, batch: SequenceBatch, tables: Mapping[str, Tensor] = NO_TABLES
    ) -> Tensor:
        """Vector of every event, [T, D]: that of its item, and features joined to it."""
        vectors = take(rows_UD, batch.tokens["item_index"])
        return vectors if self.tokens is None else self.tokens.joined(vectors, batch, tables)

    def encode(
        self,
        rows_UD: Tensor,
        batch: SequenceBatch,
        layout: SequenceLayout,
        tables: Mapping[str, Tensor] = NO_TABLES,
    ) -> tuple[Tensor, Tensor]:
        """States as the encoder leaves them, perhaps of half precision, which heads can read; and the item vectors.

        Of requests, one state a candidate: its own, or where the head takes candidates late that of its history.
        An encoder that has `from_rows` gathers vectors itself, and hands on those the head is to use: so gradients of
        both reach the rows in one sum. A rank may have no tokens in a step: code from outside is not asked then, and
        its parameters get a gradient of zeros.
        """
        if self.tokens is not None:
            return self._encode_tokens(self.tokens, rows_UD, batch, layout, tables), rows_UD
        item_index = batch.tokens["item_index"]
        if batch.targets is not None:
            states_of = history_states if getattr(self.head, "late", False) else target_states
            return states_of(self.encoder, take(rows_UD, item_index), batch, layout), rows_UD
        if batch.num_tokens == 0 and not is_ours(self.encoder):
            return take(rows_UD, item_index) + _nothing(self.encoder, rows_UD), rows_UD
        from_rows = getattr(self.encoder, "from_rows", None)
        if from_rows is not None:
            states, rows_UD = from_rows(rows_UD, item_index, batch, layout)
            return states, rows_UD
        return self.encoder(take(rows_UD, item_index), batch, layout), rows_UD

    def _encode_tokens(
        self,
        tokens: FeatureTokens | ContextTokens,
        rows_UD: Tensor,
        batch: SequenceBatch,
        layout: SequenceLayout,
        tables: Mapping[str, Tensor],
    ) -> Tensor:
        """States of events in sequences that have features in them."""
        if isinstance(tokens, ContextTokens):
            sequence = tokens.from_rows(rows_UD, batch, layout, tables)
        else:
            sequence = tokens(take(rows_UD, batch.tokens["item_index"]), batch, layout, tables)
        vectors: Any = sequence.vectors
        late = getattr(self.head, "late", False)
        takes_sums = batch.targets is not None and not late and getattr(self.encoder, "takes_sums", False)
        if isinstance(vectors, Sum) and not takes_sums:
            vectors = vectors.states().to(rows_UD.dtype)
        if batch.targets is not None:
            states_of = history_states if late else target_states
            with dropout_batch(sequence.batch, sequence.layout):
                return states_of(self.encoder, vectors, sequence.batch, sequence.layout)
        if sequence.states is None:
            return self.encoder(vectors, sequence.batch, sequence.layout)
        with dropout_batch(sequence.batch, sequence.layout):
            states = self.encoder(vectors, sequence.batch, sequence.layout)
        return states.index_select(0, sequence.states)


def is_ours(part: object) -> bool:
    """Whether an encoder or a head is part of this package; ours know batches without tokens, and exchange in them."""
    return type(part).__module__.startswith("freescale.")


def _nothing(part: object, like: Tensor) -> Tensor:
    """Zero, with a gradient of zeros for every parameter of an encoder or a head."""
    params = part.parameters() if isinstance(part, nn.Module) else ()
    none = [param.reshape(-1)[:0].sum() for param in params if param.requires_grad]
    return torch.stack(none).sum().to(like.dtype) if none else like.new_zeros(())


def make_encoder(
    kind: str,
    *,
    segments: Mapping[str, int] | None = None,
    options: object = None,
    mask: Mapping[str, Any] | MaskKind | None = None,
    **shape: Any,
) -> nn.Module:
    """The encoder a recipe or an exported manifest names.

    Args:
        kind: "hstu", "sasrec", "llama", or one from outside that is registered.
        segments: of `SegmentRule`, for histories compressed into summaries.
        options: of the kind, or a mapping with the same keys.
        mask: what tokens see, or its name and options; causal unless given. Does not go with segments.
        shape: of `EncoderShape`; max_length in events.
    """
    found = registry.find("encoder", kind)
    seen = make_mask_kind(**mask) if isinstance(mask, Mapping) else mask
    wanted = EncoderShape(**shape, mask=seen)
    own = registry.options_of(found, options)
    if segments is None:
        encoder: nn.Module = found.make(wanted, own)
        if seen is not None and getattr(encoder, "mask", None) is not seen:
            raise ConfigError(
                f"encoder {kind!r} knows no masks",
                got=f"model.mask={mask['name'] if isinstance(mask, Mapping) else seen!r}",
                next_step="leave model.mask out; an encoder that takes one keeps it as `mask`",
            )
        return encoder
    rule = SegmentRule(**segments)
    # Summaries take places of their own, so the encoder inside has room for more tokens than there are events.
    positions = int(rule.tokens(np.array([wanted.max_length]))[0])
    inner = found.make(dataclasses.replace(wanted, max_length=positions), own)
    if not hasattr(inner, "encode"):
        raise ConfigError(
            f"encoder {kind!r} cannot compress histories",
            got="no method encode(vectors, view)",
            next_step="leave segments.recent out, or give it one (freescale/model/views/view.py says how)",
        )
    return SegmentedEncoder(inner, rule=rule, dim=wanted.dim, max_positions=positions)
