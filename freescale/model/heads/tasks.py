"""Tasks: what a user does with the candidates of a request, as named tasks; candidates in the attention or late.

The loss is the sum over tasks of weight * (sum of w * loss) / (sum of w over the GLOBAL batch): a task that few
candidates count for is no smaller for it, and no number depends on which rank holds which request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.data import SequenceBatch, TaskRule, parse_tasks
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.model.head import LastEvents, Needs
from freescale.model.heads._shared_experts import SharedExperts
from freescale.model.parts.normed_mlp import normed_mlp
from freescale.model.quality.task_quality import LIMIT, AcrossRanks, TaskQuality
from freescale.registry import option, register

Towers = Literal["shared", "own", "product"]


class TasksHead(nn.Module):
    """Named tasks on (state of a candidate, its item).

    Args:
        dim: width of states and item vectors.
        tasks: what is predicted.
        late: states are those of the history, the same for all candidates; else each candidate has one of its own.
        towers: one MLP for all tasks, or one for each, on state, item and their product; or one on their product
            alone, items then being their second halves (`item_towers.py`).
        experts: shared by the tasks, each of which mixes them and has a tower of its own; 0: none.
        hidden: width inside a tower on products.
        options: what makes this head again.
    """

    takes_requests = True

    def __init__(
        self,
        *,
        dim: int,
        tasks: tuple[TaskRule, ...],
        late: bool = False,
        towers: Towers = "shared",
        experts: int = 0,
        hidden: int = 512,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.tasks, self.late = tasks, late
        outputs = [len(tasks)] if towers == "shared" else [1] * len(tasks)
        self._product = towers == "product"
        self.towers = nn.ModuleList(
            [SharedExperts(3 * dim, dim=dim, tasks=len(tasks), experts=experts)]
            if experts
            else [normed_mlp(dim, hidden, len(tasks), norm=False)]
            if self._product
            else [
                nn.Sequential(nn.Linear(3 * dim, dim), nn.SiLU(), nn.Linear(dim, width)) for width in outputs
            ]
        )
        self.needs = Needs(columns=tuple(dict.fromkeys(task.column for task in tasks)))
        self._options = dict(options or {})

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What may choose the best state: of every task how well it orders candidates, and its errors.

        The first task's first one decides unless another is named.
        """
        names = {
            "binary": ("auc", "gauc_user", "gauc_request", "ne", "logloss"),
            "number": ("xauc", "mse", "mae"),
        }
        return tuple(f"{name}/{task.name}" for task in self.tasks for name in names[task.kind])

    def logits(self, states_KD: Tensor, items_KD: Tensor) -> Tensor:
        """[K, tasks] log-odds of binary tasks, and predictions of numbers."""
        if self._product:
            return self.towers[0](states_KD * items_KD[:, -states_KD.shape[1] :])
        x = torch.cat([states_KD, items_KD, states_KD * items_KD], dim=-1)
        return torch.cat([tower(x) for tower in self.towers], dim=-1)

    def labels(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Labels and weights of the candidates, [K, tasks] each.

        What has no label (NaN) or does not meet its task's condition has weight 0, and label 0.
        """
        index = target_index(batch)
        given = {
            name: batch.tokens[f"label_{name}"].index_select(0, index).double() for name in self.needs.columns
        }
        found = {task.name: task.of(given[task.column]) for task in self.tasks}
        labels = torch.stack([found[task.name] for task in self.tasks], dim=1)
        counts = ~labels.isnan()
        for n, task in enumerate(self.tasks):
            if task.where is not None:
                counts[:, n] &= found[task.where] == 1
        weights = counts.double()
        if "label_weight" in batch.tokens:
            own = batch.tokens["label_weight"].index_select(0, index).double()
            weights = weights * own.nan_to_num(nan=0.0).clamp(min=0)[:, None]
        return labels.masked_fill(~counts, 0.0), weights

    def loss_weights(self, batch: SequenceBatch) -> Tensor:
        """[tasks] weight of this rank's candidates; the training step sums it over the ranks."""
        return self.labels(batch)[1].sum(0)

    def loss(
        self, states_TD: Tensor, rows_UD: Tensor, batch: SequenceBatch, layout: SequenceLayout
    ) -> Tensor:
        """Sum over tasks of weight * loss over the task's global weight; a task that nobody counts for gives nothing.

        Args:
            states_TD: one state a candidate, see `Recommender.encode`.
            rows_UD: the unique item vectors of the batch.
            batch: requests; its samples["loss_weights"] are the global weights. Without them: its own.
            layout: where the sequences stand.
        """
        items = F.embedding(batch.tokens["item_index"].index_select(0, target_index(batch)), rows_UD)
        logits = self.logits(states_TD.to(items.dtype), items)
        labels, weights = (x.to(logits.dtype) for x in self.labels(batch))
        totals = batch.samples.get("loss_weights")
        whole = weights.sum(0) if totals is None or not len(batch) else totals[0]
        terms = [self._loss_of(task, logits[:, n], labels[:, n]) for n, task in enumerate(self.tasks)]
        sums = (torch.stack(terms, dim=1) * weights).sum(0)
        # Weights as numbers of Python: a tensor of them would be sent to the device, and the host would wait for it.
        weighted = torch.stack([each * task.weight for each, task in zip(sums.unbind(), self.tasks)])
        return (weighted / whole.to(logits.dtype).clamp(min=torch.finfo(torch.float32).tiny)).sum()

    def _loss_of(self, task: TaskRule, logits: Tensor, labels: Tensor) -> Tensor:
        if task.kind == "binary":
            return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        if task.huber is None:
            return (logits - labels) ** 2
        return F.huber_loss(logits, labels, reduction="none", delta=task.huber)

    def metrics(self) -> TaskMetrics:
        """Metrics of every task, as docs/ranking.md defines them."""
        return TaskMetrics(self)

    def export_facts(self) -> dict[str, Any]:
        """What makes this head again."""
        return {"name": "tasks", "options": self._options}


class TaskMetrics:
    """The quality of every task; numbers are called METRIC/TASK.

    Args:
        head: what predicts.
        limit: see `TaskQuality`.
    """

    def __init__(self, head: TasksHead, *, limit: int = LIMIT) -> None:
        self._head = head
        self._tasks = [TaskQuality(task.kind, limit=limit) for task in head.tasks]

    def update(self, events: LastEvents) -> None:
        """Refuse users without requests."""
        raise ConfigError("head.kind=tasks is judged by requests", got="events without candidates")

    def update_requests(self, states_KD: Tensor, rows_UD: Tensor, batch: SequenceBatch) -> None:
        """Add the candidates of some requests."""
        index = target_index(batch)
        items = F.embedding(batch.tokens["item_index"].index_select(0, index), rows_UD)
        logits = self._head.logits(states_KD.to(items.dtype), items)
        labels, weights = self._head.labels(batch)
        request, user = (batch.samples[name].cpu() for name in ("row", "request_user"))
        assert batch.targets is not None
        for n, task in enumerate(self._tasks):
            task.update(
                logits[:, n],
                labels[:, n],
                weights=weights[:, n],
                users=user.repeat_interleave(batch.targets),
                requests=request.repeat_interleave(batch.targets),
            )

    def merge(self, ranks: AcrossRanks) -> None:
        """Bring together what the ranks have collected."""
        for task in self._tasks:
            task.merge(ranks)

    def values(self) -> dict[str, float | None]:
        """Those of `TaskQuality`, of every task."""
        return {
            f"{name}/{rule.name}": value
            for rule, task in zip(self._head.tasks, self._tasks)
            for name, value in task.values().items()
        }


def target_index(batch: SequenceBatch) -> Tensor:
    """[K] the candidates among the tokens of a batch, where its features live."""
    if batch.targets is None:
        raise ConfigError("head.kind=tasks needs requests", got="a batch without candidates")
    return batch.candidate_index(batch.device)


@dataclass(frozen=True, kw_only=True)
class TasksOptions:
    """Keys of a recipe's head."""

    tasks: tuple[str, ...] = option(
        help="one line a task: NAME = COLUMN > NUMBER, NAME = COLUMN & BITS, NAME = number COLUMN; docs/ranking.md"
    )
    candidates: int = option(10, help="candidates of a request, where requests are cut by number")
    by: str | None = option(
        None, help="column whose runs of equal values are requests; null: they are cut by number"
    )
    window: int | None = option(
        None, help="seconds; all that a user did in a window of that length is a request; null: cut by number"
    )
    weights: str | None = option(None, help="column with a weight for every candidate; null: all the same")
    pools: str | None = option(
        None,
        help="column of events; the history is the last head.pool_events of each kind in it; null: the last of all",
    )
    pool_kinds: tuple[int, ...] = option((), help="values of that column, one a pool")
    pool_events: int = option(1000, help="events of each kind in head.pools")
    pool_window: int = option(
        20_000, help="events before a request among which those of head.pools are looked for"
    )
    anchors: str | None = option(
        None, help="column; every event with a number there is a request of one candidate; null: none is"
    )
    anchor_history: int = option(1, help="events before an anchor, at least")
    anchor_days: int = option(1, help="the last days of the log are the test, as many before them validation")
    late: bool = option(False, help="candidates meet the user's state in the head only, not in the attention")
    towers: Towers = option(
        "shared",
        help="shared or own: one MLP for all tasks, or one for each; product: one on the product of a state and the "
        "tower of an item, with tokens.join=towers",
    )
    hidden: int = option(512, help="width inside the MLP of head.towers=product")
    experts: int = option(
        0,
        help="hidden layers that all tasks share, mixed by a gate for each task, a tower for each behind; needs "
        "head.towers=own; 0: none",
    )

    @property
    def one_candidate(self) -> bool:
        """Whether every request has one, and no more."""
        return self.anchors is not None or (self.candidates == 1 and self.by is None and self.window is None)

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise ConfigError("head.candidates: a request needs at least 1", got=self.candidates)
        if self.window is not None and self.window < 1:
            raise ConfigError("head.window: seconds, at least 1", got=self.window)
        if self.window is not None and self.by is not None:
            raise ConfigError("head.window: head.by says already what a request is", got=f"by {self.by}")
        if (self.pools is None) != (not self.pool_kinds) or len(set(self.pool_kinds)) < len(self.pool_kinds):
            raise ConfigError(
                "head.pools: a column, and in head.pool_kinds its values, each once",
                got=f"{self.pools}, {list(self.pool_kinds)}",
                allowed="head.pools=action head.pool_kinds=[1, 2, 4], or neither",
            )
        if self.pool_events < 1 or self.pool_window < 1:
            raise ConfigError(
                "head.pool_events and head.pool_window: at least 1",
                got=f"{self.pool_events}, {self.pool_window}",
            )
        if self.anchors is not None and (self.by is not None or self.window is not None):
            raise ConfigError("head.anchors: head.by or head.window says already what a request is")
        if self.anchor_history < 1 or self.anchor_days < 1 or self.hidden < 1:
            raise ConfigError(
                "head.anchor_history, head.anchor_days and head.hidden: at least 1",
                got=f"{self.anchor_history}, {self.anchor_days}, {self.hidden}",
            )
        if self.towers not in ("shared", "own", "product"):
            raise ConfigError("head.towers: unknown", got=self.towers, allowed="shared, own, product")
        if self.experts < 0 or (self.experts and self.towers != "own"):
            raise ConfigError(
                "head.experts: shared experts need a tower for each task",
                got=f"{self.experts} experts, head.towers={self.towers}",
                next_step="set head.towers=own, or head.experts=0",
            )
        self._check_read()

    def _check_read(self) -> None:
        """A key that was set and that nobody reads is refused."""
        why: dict[str, str] = {}
        if self.anchors is None:
            why |= dict.fromkeys(("anchor_history", "anchor_days"), "only with head.anchors")
        elif self.candidates != 1:
            why["candidates"] = "with head.anchors every request has one"
        if self.pools is None:
            why |= dict.fromkeys(("pool_events", "pool_window"), "only with head.pools")
        if self.towers != "product":
            why["hidden"] = "only with head.towers=product"
        unread = {
            each.name: why[each.name]
            for each in fields(self)
            if each.name in why and getattr(self, each.name) != each.default
        }
        if unread:
            raise ConfigError(
                "; ".join(f"head.{name}: {reason}" for name, reason in unread.items()),
                got=", ".join(f"head.{name}={getattr(self, name)}" for name in unread),
                next_step="leave it out",
            )


@register("head", "tasks", options=TasksOptions)
def make_tasks(dim: int, options: TasksOptions) -> TasksHead:
    """A head of named tasks as a recipe describes it."""
    rules = parse_tasks(options.tasks)
    shape: dict[str, Any] = {"late": options.late, "towers": options.towers, "experts": options.experts}
    if options.towers == "product":
        shape["hidden"] = options.hidden
    kept = {"tasks": list(options.tasks), **shape}
    if options.pools is not None:  # a service must find the same history
        kept |= {
            "pools": options.pools,
            "pool_kinds": list(options.pool_kinds),
            "pool_events": options.pool_events,
            "pool_window": options.pool_window,
        }
    return TasksHead(dim=dim, tasks=rules, options=kept, **shape)
