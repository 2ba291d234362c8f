"""An encoder in a training step of its own, for tests of dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from freescale import SequenceBatch, dropout_keys
from freescale.kernels import SequenceLayout
from freescale.model.parts.dropout import number_sites


def dropping(encoder: nn.Module, vectors: Tensor, batch: SequenceBatch, step: int) -> Tensor:
    """States under the masks of a step; samples are told apart by where they stand unless the batch says more."""
    if "row" not in batch.samples:
        batch = batch.with_samples(row=torch.arange(len(batch), device=vectors.device))
    number_sites(encoder)
    with dropout_keys(seed=0, step=step, batch=batch):
        return encoder(vectors, batch, SequenceLayout(batch.offsets, device=vectors.device))
