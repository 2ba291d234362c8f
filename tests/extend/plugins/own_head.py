"""Two towers with a metric of its own: a head from outside the package that is judged, exported and served."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from freescale import register
from freescale.model import FULL_RANKING, Needs


@dataclass(frozen=True, kw_only=True)
class TowerOptions:
    """Keys of a recipe, beside those of every head."""

    tower_width: int = 8


@register("head", "two_towers", options=TowerOptions)
class TwoTowers(nn.Module):
    """Users and items meet in a width of their own; softmax over the negatives of the sample."""

    needs = Needs(negatives=True)
    metric_names = ("hit_or_near", *FULL_RANKING)

    def __init__(self, dim, options):
        super().__init__()
        self.user, self.item = (nn.Linear(dim, options.tower_width) for _ in range(2))

    def queries(self, states):
        return F.normalize(self.user(states), dim=-1)

    def candidates(self, rows):
        return F.normalize(self.item(rows), dim=-1)

    def loss(self, states, rows, batch, layout):
        users, items = self.queries(states.to(rows.dtype)), self.candidates(rows)
        sample = torch.arange(len(batch)).repeat_interleave(batch.lengths).to(states.device)
        right = (users * items[batch.tokens["target_index"]]).sum(-1, keepdim=True)
        wrong = torch.einsum("td,tnd->tn", users, items[batch.samples["negative_index"][sample]])
        logits = torch.cat([right, wrong], 1) / 0.1
        return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long), reduction="sum")

    def metrics(self):
        return HitOrNear()

    def export_facts(self):
        return {"name": "two_towers", "options": {"tower_width": self.user.out_features}}


class HitOrNear:
    def __init__(self):
        self.sums = torch.zeros(2, dtype=torch.float64)

    def update(self, events):
        self.sums += torch.tensor([float((events.target_rank < 3).sum()), len(events.target_rank)])

    def values(self):
        return {"hit_or_near": float(self.sums[0] / self.sums[1])}
