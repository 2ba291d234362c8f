"""What states are trained for: the next item (retrieval), or what the user does with it (ranking).

Both return the SUM of the losses of this rank's tokens. Dividing by the global count is the training step's work, so
that the curve does not depend on which rank holds which sample.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.data import SequenceBatch
from freescale.kernels import SequenceLayout, sampled_softmax, unit


class RetrievalHead(nn.Module):
    """Sampled softmax: the next item against the negatives of the sample.

    Args:
        temperature: divides the logits.
        normalize: compare directions (cosine) instead of plain dot products.
    """

    def __init__(self, *, temperature: float = 0.05, normalize: bool = True) -> None:
        super().__init__()
        self.temperature = temperature
        self.normalize = normalize

    def vectors(self, x: Tensor) -> Tensor:
        """States or item vectors as they enter the dot product."""
        return unit(x) if self.normalize else x

    def forward(
        self, states_TD: Tensor, rows_UD: Tensor, batch: SequenceBatch, layout: SequenceLayout
    ) -> Tensor:
        """Sum over tokens of -log softmax(next item against negatives).

        Args:
            states_TD: one state a token.
            rows_UD: the distinct item vectors of the batch.
            batch: carries token feature "target_slot" and sample feature "negative_slot", places in `rows_UD`.
            layout: where the sequences stand.
        """
        return sampled_softmax(
            states_TD,
            rows_UD,
            batch.tokens["target_slot"],
            batch.samples["negative_slot"],
            layout,
            temperature=self.temperature,
            normalize=self.normalize,
        )


class RankingHead(nn.Module):
    """Several binary tasks on (state, next item): label = action on the next item > threshold.

    Args:
        dim: width of states and item vectors.
        thresholds: one task a threshold.
    """

    def __init__(self, *, dim: int, thresholds: tuple[float, ...]) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3 * dim, dim), nn.SiLU(), nn.Linear(dim, len(thresholds)))
        self.thresholds = thresholds

    def logits(self, states_TD: Tensor, items_TD: Tensor) -> Tensor:
        """[T, tasks] log-odds that the user acts on the item."""
        return self.mlp(torch.cat([states_TD, items_TD, states_TD * items_TD], dim=-1))

    def labels(self, batch: SequenceBatch) -> Tensor:
        """[T, tasks] 1.0 where the action on the next item exceeds the threshold."""
        action = batch.tokens["target_action"]
        return (action[:, None] > torch.tensor(self.thresholds, device=action.device)).float()

    def forward(
        self, states_TD: Tensor, rows_UD: Tensor, batch: SequenceBatch, layout: SequenceLayout
    ) -> Tensor:
        """Sum over tokens of the tasks' mean binary cross-entropy."""
        items = F.embedding(batch.tokens["target_slot"], rows_UD)
        logits = self.logits(states_TD.to(items.dtype), items)
        labels = self.labels(batch)
        return (
            F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
            / labels.shape[1]
        )
