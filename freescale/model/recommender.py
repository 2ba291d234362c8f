"""Recommender: an encoder and a head over one jagged batch and its distinct item vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from freescale.data.sequence_batch import SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.model.hstu import HSTU
from freescale.model.moe import Dispatch
from freescale.model.sasrec import SASRec


class Recommender(nn.Module):
    """The dense part of the model. Item vectors come from outside, so that tables can live anywhere.

    Args:
        encoder: states from item vectors (HSTU, SASRec, ...).
        head: loss from states and item vectors.
    """

    def __init__(self, *, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, rows_UD: Tensor, batch: SequenceBatch) -> Tensor:
        """Sum of the losses of the batch's tokens.

        Args:
            rows_UD: the distinct item vectors of the batch.
            batch: carries "item_slot" and what the head needs, as places in `rows_UD`.
        """
        layout = SequenceLayout(batch.offsets, device=rows_UD.device)
        return self.head(self.states(rows_UD, batch, layout), rows_UD, batch, layout)

    def states(self, rows_UD: Tensor, batch: SequenceBatch, layout: SequenceLayout) -> Tensor:
        """State of every token, [T, D]."""
        return self.encoder(F.embedding(batch.tokens["item_slot"], rows_UD), batch, layout)


def make_encoder(
    kind: str,
    *,
    position_bias: bool,
    time_bias: bool,
    ffn: Mapping[str, Any] | None = None,
    dispatch: Dispatch | None = None,
    **shape: Any,
) -> nn.Module:
    """The encoder a recipe or an exported manifest names; SASRec has no relative bias and one feed-forward part."""
    if kind == "hstu":
        return HSTU(**shape, position_bias=position_bias, time_bias=time_bias, ffn=ffn, dispatch=dispatch)
    if kind == "sasrec":
        return SASRec(**shape)
    raise ConfigError("unknown encoder", got=kind, allowed="hstu, sasrec")
