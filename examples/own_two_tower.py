"""Two towers, registered: recipes, commands and exports can name them.

python examples/own_two_tower.py [FOLDER]
In examples/ also: freescale train --plugin own_two_tower model.kind=mean_history head.kind=two_tower --nproc 2
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

from freescale import Trainer, load_export, register
from freescale.model import FULL_RANKING, Needs


@register("encoder", "mean_history")
class MeanHistory(nn.Module):  # the user's tower: the mean of the events so far
    def __init__(self, shape, options):
        super().__init__()
        self.wide, self.out = nn.Linear(shape.dim, 2 * shape.dim), nn.Linear(2 * shape.dim, shape.dim)

    def forward(self, vectors, batch, layout):
        sums = torch.cat([part.cumsum(0) for part in vectors.split(batch.lengths.tolist())])
        return self.out(self.wide(sums / (layout.positions[:, None] + 1)).relu())


@register("head", "two_tower")  # options=: a frozen dataclass, whose fields become keys of the recipe
class TwoTower(nn.Module):  # the items' tower, and a softmax over the negatives of the sample
    needs, metric_names = Needs(negatives=True), FULL_RANKING

    def __init__(self, dim, options):
        super().__init__()
        self.item = nn.Linear(dim, dim)

    def queries(self, states):
        return F.normalize(states, dim=-1)

    def candidates(self, rows):
        return F.normalize(self.item(rows), dim=-1)

    def loss(self, states, rows, batch, layout):
        sample = torch.arange(len(batch)).repeat_interleave(batch.lengths).to(states.device)
        offered = torch.cat(
            [batch.tokens["target_index"][:, None], batch.samples["negative_index"][sample]], 1
        )
        logits = torch.einsum("td,tnd->tn", self.queries(states), self.candidates(rows)[offered])
        return F.cross_entropy(10 * logits, torch.zeros_like(offered[:, 0]), reduction="sum")


def trainer(folder, **recipe):
    small = {"run.steps": 40, "synthetic.users": 400, "model.dim": 16, "head.num_negatives": 32, **recipe}
    return Trainer(encoder="mean_history", head="two_tower", recipe={"run.out": f"{folder}/run", **small})


if __name__ == "__main__":
    training = trainer(folder := (sys.argv[1:] or ["runs/two_tower"])[0])
    training.fit()
    print(load_export(training.export(f"{folder}/export")).recommend([31, 7, 12], k=5))
