"""Retrieval: the next item out of the whole catalogue, trained by a softmax over sampled negatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from freescale.data import SequenceBatch
from freescale.kernels import SequenceLayout, sampled_softmax, unit
from freescale.model.head import Needs
from freescale.model.quality.metrics import FULL_RANKING
from freescale.registry import register


class RetrievalHead(nn.Module):
    """Sampled softmax: the next item against the negatives of the sample.

    Args:
        temperature: divides the logits.
        normalize: compare directions (cosine) instead of plain dot products.
    """

    needs = Needs(negatives=True)
    takes_pads = True
    metric_names = FULL_RANKING

    def __init__(self, *, temperature: float = 0.05, normalize: bool = True) -> None:
        super().__init__()
        self.temperature = temperature
        self.normalize = normalize

    def queries(self, states: Tensor) -> Tensor:
        """States as they enter the dot product."""
        return unit(states) if self.normalize else states

    def candidates(self, rows: Tensor) -> Tensor:
        """Item vectors as they enter the dot product: states and items are treated alike."""
        return self.queries(rows)

    def loss(
        self, states_TD: Tensor, rows_UD: Tensor, batch: SequenceBatch, layout: SequenceLayout
    ) -> Tensor:
        """Sum over tokens of -log softmax(next item against negatives).

        Args:
            states_TD: one state a token.
            rows_UD: the unique item vectors of the batch.
            batch: carries token feature "target_index" and sample feature "negative_index", indices into `rows_UD`.
            layout: where the sequences stand.
        """
        return sampled_softmax(
            states_TD,
            rows_UD,
            batch.tokens["target_index"],
            batch.samples["negative_index"],
            layout,
            temperature=self.temperature,
            normalize=self.normalize,
        )

    def export_facts(self) -> dict[str, Any]:
        """What makes this head again."""
        return {
            "name": "retrieval",
            "options": {"temperature": self.temperature, "normalize": self.normalize},
        }


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions:
    """Keys of a recipe's head.

    Args:
        temperature: divides the logits of the sampled softmax.
        normalize: l2-normalise user and item vectors.
    """

    temperature: float = 0.05
    normalize: bool = True


@register("head", "retrieval", options=RetrievalOptions)
def make_retrieval(dim: int, options: RetrievalOptions) -> RetrievalHead:
    """A retrieval head as a recipe describes it."""
    return RetrievalHead(temperature=options.temperature, normalize=options.normalize)
