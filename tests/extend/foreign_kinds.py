"""Kinds as somebody outside the package would write them: two encoders, two heads, in one file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from freescale.model import FULL_RANKING, LastEvents, Needs
from freescale.registry import register


@dataclass(frozen=True, kw_only=True)
class FadingOptions:
    """How fast the past fades."""

    keep: float = 0.5


class Fading(nn.Module):
    """A weighted sum of the past, event by event: no attention, no views."""

    def __init__(self, *, dim: int, keep: float) -> None:
        super().__init__()
        self.keep = keep
        self.mix = nn.Linear(dim, dim)

    def forward(self, vectors_TD, batch, layout):
        states = []
        for first, last in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:]):
            state = vectors_TD.new_zeros(vectors_TD.shape[1])
            for vector in vectors_TD[first:last]:
                state = self.keep * state + vector
                states.append(state)
        return self.mix(torch.stack(states) if states else vectors_TD)


@register("encoder", "fading", options=FadingOptions)
def make_fading(shape, options):
    """A factory."""
    return Fading(dim=shape.dim, keep=options.keep)


@dataclass(frozen=True, kw_only=True)
class BilinearOptions:
    """Width the two sides meet in."""

    width: int
    margins: tuple[float, ...] = (0.0,)


class BilinearHead(nn.Module):
    """Scores by a product in another width, with weights of its own; judged by full ranking and one number more."""

    needs = Needs(negatives=True)
    metric_names = ("mean_log_rank", *FULL_RANKING)

    def __init__(self, *, dim: int, options: BilinearOptions) -> None:
        super().__init__()
        self.options = options
        self.user, self.item = (nn.Linear(dim, options.width, bias=False) for _ in range(2))

    def queries(self, states):
        return self.user(states)

    def candidates(self, rows):
        return self.item(rows)

    def loss(self, states, rows, batch, layout):
        score = (
            self.queries(states.to(rows.dtype)) * self.candidates(rows)[batch.tokens["target_index"]]
        ).sum(-1)
        return sum(F.softplus(margin - score).sum() for margin in self.options.margins)

    def metrics(self):
        return MeanLogRank()

    def export_facts(self):
        return {
            "name": "bilinear",
            "options": {"width": self.options.width, "margins": list(self.options.margins)},
        }


class MeanLogRank:
    """-mean(log(1 + place of the target)), from what full ranking has counted."""

    def __init__(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64)

    def update(self, events: LastEvents) -> None:
        assert events.target_rank is not None
        places = events.target_rank.cpu().double()
        self.sums += torch.stack([-torch.log1p(places).sum(), torch.tensor(float(len(places)))])

    def values(self):
        total, count = self.sums.tolist()
        return {"mean_log_rank": total / count if count else None}


@register("head", "bilinear", options=BilinearOptions)
def make_bilinear(dim, options):
    """A factory."""
    return BilinearHead(dim=dim, options=options)


@register("head", "next_action")
class NextActionHead(nn.Module):
    """Predicts the number a user gives to the next item; judged by its own error alone. The class is the factory."""

    needs = Needs(columns=("action",))
    metric_names = ("minus_rmse",)

    def __init__(self, dim, options=None) -> None:
        super().__init__()
        self.answer = nn.Linear(2 * dim, 1)

    def predicted(self, states, items):
        return self.answer(torch.cat([states, items], dim=-1))[:, 0]

    def loss(self, states, rows, batch, layout):
        items = rows[batch.tokens["target_index"]]
        wanted = batch.tokens["target_action"].to(rows.dtype)
        return (self.predicted(states.to(rows.dtype), items) - wanted).square().sum()

    def metrics(self):
        return MinusRmse(self)


class MinusRmse:
    """Minus the root of the mean squared error, so that larger is better."""

    def __init__(self, head: NextActionHead) -> None:
        self.head = head
        self.sums = torch.zeros(2, dtype=torch.float64)

    def update(self, events: LastEvents) -> None:
        assert events.target_rank is None
        error = self.head.predicted(events.states, events.items) - events.tokens["target_action"]
        self.sums += torch.tensor([error.double().square().sum(), len(error)], dtype=torch.float64)

    def values(self):
        total, count = self.sums.tolist()
        return {"minus_rmse": -math.sqrt(total / count) if count else None}
