"""What a page says of tasks, whose metrics are called METRIC/TASK: a chart a metric, a row a task in tables."""

from __future__ import annotations

from collections.abc import Sequence

from freescale import units
from freescale.pages.drawing import page
from freescale.trace import Event, MetricsLog, column, step_of

DRAWN = ("auc", "gauc_user", "gauc_request", "ne", "calibration", "xauc", "mse", "mae")
"""Metrics that have a chart, and a column; the others are in metrics.jsonl."""
TASK_TITLES = {
    "auc": "AUC",
    "gauc_user": "AUC by user",
    "gauc_request": "AUC by request",
    "ne": "Normalised entropy, below 1 beats the constant",
    "calibration": "Predicted over true, 1 is right",
    "xauc": "Pairs in order",
    "mse": "Mean squared error",
    "mae": "Mean absolute error",
}
_DECILES = 10


def of_tasks(metrics: Sequence[str]) -> dict[str, list[str]]:
    """Metric -> those of every task, of what is drawn; empty where a run has no tasks."""
    found: dict[str, list[str]] = {}
    for name in metrics:
        kind, between, _ = name.partition("/")
        if between and kind in DRAWN:
            found.setdefault(kind, []).append(name)
    return {kind: found[kind] for kind in DRAWN if kind in found}


def task_table(log: MetricsLog, best_step: int | None) -> str:
    """Every evaluation, a row a task; the best one and the test set off."""
    kinds = of_tasks(log.eval_metrics())
    tasks = list(dict.fromkeys(name.partition("/")[2] for names in kinds.values() for name in names))
    rows = []
    told = [(event, f"{step_of(event):,}", step_of(event) == best_step) for event in log.evals]
    told += [] if log.test is None else [(log.test, "test", True)]
    for event, name, marked in told:
        for task in tasks:
            cells = [_cell(event, f"{kind}/{task}") for kind in kinds]
            rows.append(page.Row([name, task, *cells], "best" if marked else ""))
    return page.table(["step", "task", *(kind.replace("_", " by ") for kind in kinds)], rows) + _deciles(
        log, tasks
    )


def _deciles(log: MetricsLog, tasks: Sequence[str]) -> str:
    """Predicted over true in ten parts of the candidates, from those that were thought least likely on."""
    event = log.test or (log.evals[-1] if log.evals else None)
    names = [f"calibration_{n}" for n in range(1, _DECILES + 1)]
    if event is None:
        return ""
    rows = [
        page.Row([task, *(_cell(event, f"{name}/{task}") for name in names)])
        for task in tasks
        if any(column([event], f"{name}/{task}")[0] is not None for name in names)
    ]
    heads = ["predicted over true, by decile", *(str(n) for n in range(1, _DECILES + 1))]
    return page.table(heads, rows) if rows else ""


def _cell(event: Event, metric: str) -> str:
    value = column([event], metric)[0]
    return "-" if value is None else units.metric(value)
