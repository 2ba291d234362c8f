"""What states are trained for: the next item (retrieval), or what the user does with it (ranking).

Both return the SUM of the losses of this rank's tokens. Dividing by the global count is the training step's work, so
that the curve does not depend on which rank holds which sample.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.data.sequence_batch import SequenceBatch
from freescale.kernels import SequenceLayout

_NEVER = -5e4


def unit(x: Tensor) -> Tensor:
    """X divided by its l2 norm, in float32 or better."""
    wide = x if x.dtype == torch.float64 else x.float()
    return wide / wide.norm(dim=-1, keepdim=True).clamp(min=1e-6)


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
            layout: the batch's tiles; negatives are shared inside a sequence, so whole tiles meet them at once.
        """
        states = self.vectors(states_TD)
        # Normalising the distinct rows once is cheaper than normalising every occurrence.
        rows = self.vectors(rows_UD).to(states.dtype)
        target = batch.tokens["target_slot"]
        positive = (states * F.embedding(target, rows)).sum(-1, keepdim=True)
        tiles = layout.tiles
        negative_slot = batch.samples["negative_slot"].index_select(0, tiles.tile_sequence)
        negatives = F.embedding(negative_slot, rows)
        against = tiles.to_tokens(tiles.to_tiles(states) @ _transposed(negatives))
        hit = tiles.to_tokens(tiles.to_tiles(target)[:, :, None] == negative_slot[:, None, :])
        logits = torch.cat([positive, against.masked_fill(hit, _NEVER)], dim=1) / self.temperature
        return (logits.logsumexp(-1) - logits[:, 0]).sum()


def _transposed(x: Tensor) -> Tensor:
    """[n, a, b] -> [n, b, a]; on a CPU laid out anew, which its small batched products want (8 times faster on Arm)."""
    turned = x.transpose(1, 2)
    return turned.contiguous() if x.device.type == "cpu" else turned


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
        logits = self.logits(states_TD, items.to(states_TD.dtype))
        labels = self.labels(batch)
        return (
            F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
            / labels.shape[1]
        )
