"""What a terminal says of tasks, whose metrics are called METRIC/TASK: of many numbers the few people look at."""

from __future__ import annotations

from collections.abc import Mapping

from freescale import units

TASK_SHOWN = ("auc/", "gauc_user/", "ne/", "calibration/", "mse/", "xauc/")
"""How names of metrics begin that are shown; all of them are in metrics.jsonl and on the report page."""


def task_rows(name: str, metrics: object) -> dict[str, str] | None:
    """A row a task; None where these are not metrics of tasks."""
    if not isinstance(metrics, Mapping) or not any("/" in str(key) for key in metrics):
        return None
    rows: dict[str, list[str]] = {}
    for key, value in metrics.items():
        kind, _, task = str(key).partition("/")
        number = units.number(value)
        if task and number is not None and f"{kind}/" in TASK_SHOWN:
            rows.setdefault(f"{name} {task}", []).append(f"{kind} {units.metric(number)}")
    return {row: "  ".join(said) for row, said in rows.items()}
