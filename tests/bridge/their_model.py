"""A model as a team with TorchRec has it, and its batches: two tables, one shared by two features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

DIM, ROWS, STEPS = 8, {"item": 40, "user": 23}, 20
KEYS = ("seen", "wanted", "who")


@dataclass
class Config:
    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str]


CONFIGS = [Config("item", ROWS["item"], DIM, ["seen", "wanted"]), Config("user", ROWS["user"], DIM, ["who"])]


class TheirModel(nn.Module):
    """Its forward returns the mean loss of this rank, as theirs do."""

    def __init__(self, tables):
        super().__init__()
        torch.manual_seed(3)
        self.tables, self.mix = tables, nn.Linear(3 * DIM, 1)

    def forward(self, kjt):
        found = self.tables(kjt)
        pooled = [self.mean(found[key]) for key in KEYS]
        return self.mix(torch.cat(pooled, 1)).square().mean()

    def mean(self, feature):
        lengths = feature.lengths()
        sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
        sums = torch.zeros(len(lengths), DIM).index_add(0, sample, feature.values())
        return sums / lengths.clamp(min=1)[:, None]


def features(step, rank, make):
    """The features of one rank's four samples; some are empty."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(KEYS), 4), generator=draw)
    lengths[:, 0] += 1
    tops = [ROWS["item"], ROWS["item"], ROWS["user"]]
    values = [
        torch.randint(top, (int(n),), generator=draw) for top, n in zip(tops, lengths.sum(1), strict=True)
    ]
    return make(list(KEYS), torch.cat(values), lengths.flatten())


def first_rows():
    draw = torch.Generator().manual_seed(9)
    return {
        name: {"weight": torch.randn(rows, DIM, generator=draw) / 3, "momentum1": torch.zeros(rows)}
        for name, rows in ROWS.items()
    }
