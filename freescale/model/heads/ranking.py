"""Ranking: what the user does with the next item, as binary tasks over thresholds of an action."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.data import SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.model.head import LastEvents, Needs
from freescale.model.quality.metrics import BinaryQuality
from freescale.registry import register


class RankingHead(nn.Module):
    """Several binary tasks on (state, next item): label = action on the next item > threshold.

    Args:
        dim: width of states and item vectors.
        thresholds: one task a threshold.
    """

    needs = Needs(columns=("action",))

    def __init__(self, *, dim: int, thresholds: tuple[float, ...]) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3 * dim, dim), nn.SiLU(), nn.Linear(dim, len(thresholds)))
        self.thresholds = thresholds

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The AUC of every task."""
        return tuple(task_name("auc", task) for task in range(len(self.thresholds)))

    def logits(self, states_TD: Tensor, items_TD: Tensor) -> Tensor:
        """[T, tasks] log-odds that the user acts on the item."""
        return self.mlp(torch.cat([states_TD, items_TD, states_TD * items_TD], dim=-1))

    def labels(self, action: Tensor) -> Tensor:
        """[T, tasks] 1.0 where the action on the next item exceeds the threshold."""
        # One comparison a task: a tensor of thresholds would be sent to the device, and the host would wait for it.
        return torch.stack([action > threshold for threshold in self.thresholds], dim=1).float()

    def loss(
        self, states_TD: Tensor, rows_UD: Tensor, batch: SequenceBatch, layout: SequenceLayout
    ) -> Tensor:
        """Sum over tokens of the tasks' mean binary cross-entropy."""
        items = F.embedding(batch.tokens["target_index"], rows_UD)
        logits = self.logits(states_TD.to(items.dtype), items)
        labels = self.labels(batch.tokens["target_action"])
        return (
            F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
            / labels.shape[1]
        )

    def metrics(self) -> TaskQuality:
        """AUC, normalised entropy, calibration and log loss of every task."""
        return TaskQuality(self)


class TaskQuality:
    """Quality of the predictions for the last event of every user; numbers of later tasks end in "/1", "/2", ...

    Args:
        head: what predicts.
    """

    def __init__(self, head: RankingHead) -> None:
        self._head = head
        self.sums = torch.zeros(len(head.thresholds), BinaryQuality.NUM_SUMS, dtype=torch.float64)
        self._tasks = [BinaryQuality(row) for row in self.sums]

    def update(self, events: LastEvents) -> None:
        """Add one prediction a user."""
        logits = self._head.logits(events.states, events.items)
        labels = self._head.labels(events.tokens["target_action"])
        for n, task in enumerate(self._tasks):
            task.update(logits[:, n], labels[:, n])

    def values(self) -> dict[str, float | None]:
        """Those of `BinaryQuality`, for every task."""
        return {
            task_name(name, n): value
            for n, task in enumerate(self._tasks)
            for name, value in task.values().items()
        }


def task_name(metric: str, task: int) -> str:
    """What a task's metric is called; the first task is the one a run is judged by."""
    return metric if task == 0 else f"{metric}/{task}"


@dataclass(frozen=True, kw_only=True)
class RankingOptions:
    """Keys of a recipe's head.

    Args:
        label_thresholds: one binary task a threshold, label = action > threshold.
    """

    label_thresholds: tuple[float, ...] = (3.5,)


@register("head", "ranking", options=RankingOptions)
def make_ranking(dim: int, options: RankingOptions) -> RankingHead:
    """A ranking head as a recipe describes it."""
    if not options.label_thresholds:
        raise ConfigError("head.label_thresholds: a ranking head needs at least one")
    return RankingHead(dim=dim, thresholds=options.label_thresholds)
