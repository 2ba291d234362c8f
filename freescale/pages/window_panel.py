"""Windows of a log: what came with each, and how well it was foreseen before it was learnt."""

from __future__ import annotations

import datetime

from freescale import units
from freescale.pages import page
from freescale.pages.run_charts import metric_label
from freescale.trace import Event, MetricsLog


def window_panel(log: MetricsLog) -> str:
    """A row a window, where a run learns from a log."""
    if not log.windows:
        return ""
    tests = {event.get("window"): event for event in log.evals if event.get("split") == "next"}
    metrics = [name for name in log.eval_metrics() if name in ("hr@10", "ndcg@10", "auc")]
    head = ["window", "until", "step", "rows", "new events", "late", "new items", "targets", "unknown items"]
    rows, items = [], 0.0
    for event in log.windows:
        known = units.number(event.get("items")) or 0.0
        test = tests.get(event.get("window"), {})
        cells = [_count(event, "window"), _until(event)]
        cells += [_count(event, name) for name in ("step", "rows", "events", "late")]
        cells += [f"{known - items:,.0f}", _count(event, "targets"), _share(test)]
        cells += [
            "-" if (value := units.number(test.get(name))) is None else units.metric(value)
            for name in metrics
        ]
        rows.append(page.Row(cells))
        items = known
    said = (
        "Metrics are of each window before it was learnt, among the items known until then. Unknown items are the "
        "share of its targets that nobody had met: they are left out of the metrics."
    )
    labels = [*head, *(metric_label(name) for name in metrics)]
    return page.table(labels, rows) + f'<p class="note">{said}</p>'


def _count(event: Event, name: str) -> str:
    value = units.number(event.get(name))
    return "-" if value is None else f"{value:,.0f}"


def _until(event: Event) -> str:
    moment = units.number(event.get("last"))
    if moment is None:
        return "-"
    try:
        return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return f"{moment:.0f}"


def _share(test: Event) -> str:
    targets, unknown = units.number(test.get("targets")), units.number(test.get("unknown"))
    return "-" if not targets or unknown is None else units.percent(unknown / targets)
