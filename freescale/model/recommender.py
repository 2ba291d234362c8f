"""Recommender: an encoder and a head over one jagged batch and its distinct item vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from freescale.data import SegmentRule, SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.kernels.rows import take
from freescale.model.decoder import Decoder
from freescale.model.hstu import HSTU
from freescale.model.moe import Dispatch
from freescale.model.sasrec import SASRec
from freescale.model.segmented import SegmentedEncoder


class Recommender(nn.Module):
    """The dense part of the model. Item vectors come from outside, so that tables can live anywhere.

    Args:
        encoder: states from item vectors (HSTU, SASRec, ...).
        head: loss from states and item vectors.
        items: what computes item vectors, where they are not rows of a table. It is kept here with the rest of the
            dense part, but called by the training step: once for all occurrences of an item.
    """

    def __init__(self, *, encoder: nn.Module, head: nn.Module, items: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.items = items

    def without_items(self) -> Recommender:
        """The same encoder and head, without what computes item vectors."""
        return self if self.items is None else Recommender(encoder=self.encoder, head=self.head)

    def forward(self, rows_UD: Tensor, batch: SequenceBatch) -> Tensor:
        """Sum of the losses of the batch's tokens.

        Args:
            rows_UD: the distinct item vectors of the batch.
            batch: carries "item_slot" and what the head needs, as places in `rows_UD`.
        """
        layout = SequenceLayout(batch.offsets, device=rows_UD.device)
        states, rows_UD = self.encode(rows_UD, batch, layout)
        return self.head(states, rows_UD, batch, layout)

    def states(self, rows_UD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> Tensor:
        """State of every token, [T, D]."""
        return self.encode(rows_UD, batch, layout)[0].to(rows_UD.dtype)

    def encode(self, rows_UD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        """States as the encoder leaves them, perhaps of half precision, which heads can read; and the item vectors."""
        slots = batch.tokens["item_slot"]
        if isinstance(self.encoder, HSTU):
            return self.encoder.from_rows(rows_UD, slots, batch, layout)
        return self.encoder(take(rows_UD, slots), batch, layout), rows_UD


def make_encoder(kind: str, *, segments: Mapping[str, int] | None = None, **shape: Any) -> nn.Module:
    """The encoder a recipe or an exported manifest names.

    Args:
        kind: "hstu", "sasrec" or "llama".
        segments: of `SegmentRule`, for histories compressed into summaries.
        shape: dim, layers, heads, max_length (in events), dropout, mask (of `make_mask_kind`; not with segments), ffn
            and dispatch (see `make_ffn`), and options of the kind.
    """
    if segments is None:
        return _make_plain(kind, **shape)
    rule = SegmentRule(**segments)
    # Summaries take places of their own, so the encoder inside has room for more tokens than there are events.
    places = int(rule.tokens(np.array([shape["max_length"]]))[0])
    inner = _make_plain(kind, **{**shape, "max_length": places})
    return SegmentedEncoder(inner, rule=rule, dim=shape["dim"], max_places=places)


def _make_plain(
    kind: str,
    *,
    position_bias: bool,
    time_bias: bool,
    ffn: Mapping[str, Any] | None = None,
    dispatch: Dispatch | None = None,
    kv_heads: int | None = None,
    ffn_dim: int | None = None,
    rope_base: float = 10_000.0,
    **shape: Any,
) -> nn.Module:
    """An encoder over whole sequences; each takes the options it knows."""
    if kind == "hstu":
        return HSTU(**shape, position_bias=position_bias, time_bias=time_bias, ffn=ffn, dispatch=dispatch)
    if kind == "sasrec":
        return SASRec(**shape)
    if kind == "llama":
        return Decoder(
            **shape, kv_heads=kv_heads, ffn_dim=ffn_dim, rope_base=rope_base, ffn=ffn, dispatch=dispatch
        )
    raise ConfigError("unknown encoder", got=kind, allowed="hstu, sasrec, llama")
