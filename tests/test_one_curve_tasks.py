"""One curve for tasks over requests: conditions, weights and missing labels are divided by what all ranks hold."""

from __future__ import annotations

import pytest

from tests.effort import slow
from tests.test_one_curve import assert_same_curve, on_ranks

TASKS = (
    "head.tasks=like = action & 2,share = action & 4 where like weight 0.5,"
    "watched = number watched log huber 2 where like"
)
RECIPE = (
    *("synthetic.features=true", "head.kind=tasks", TASKS, "head.candidates=4", "eval.metric=auc/like"),
    *("model.dtype=float64", "optim.lr=0.01", "run.steps=6", "run.eval_every=6", "data.global_batch=10"),
)
KINDS = {
    "in the attention": RECIPE,
    "late, towers, dropout": (*RECIPE, "head.late=true", "head.towers=own", "model.dropout=0.2"),
    "windows, experts, outcomes behind events": (
        *RECIPE,
        *("head.window=3600", "head.towers=own", "head.experts=3"),
        *("features.action.of=event", "features.action.is=bits", "features.action.names=[view,like,share]"),
        *("features.action.outcome=true", "features.action.as=after", "features.item.of=event"),
        *("features.item.is=id", "features.watched.of=event", "features.watched.is=number"),
        *("features.watched.outcome=true", "features.country.of=user", "features.country.is=id"),
        "features.country.values=[de,fr,in,us]",
    ),
    "weighted by a column, requests by a column": (
        *RECIPE,
        "head.by=hour",
        "head.weights=hour",
        "model.dropout=0.2",
    ),
}


@pytest.mark.parametrize(
    ("kind", "num_ranks", "change"),
    [
        ("in the attention", 3, ("optim.accumulate=3",)),
        slow("in the attention", 4, ()),
        ("windows, experts, outcomes behind events", 2, ()),
        slow("late, towers, dropout", 2, ()),
        slow("late, towers, dropout", 4, ("pipeline.prioritized=false",)),
        ("weighted by a column, requests by a column", 2, ("balance.enabled=false", "data.workers=1")),
    ],
)
def test_ranks_do_not_change_the_curve(kind, num_ranks, change):
    assert_same_curve(on_ranks(num_ranks, (*KINDS[kind], *change)), on_ranks(1, KINDS[kind]))
