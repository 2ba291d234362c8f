"""Windows of a log: what came with each, and how well it was foreseen before it was learnt."""

from __future__ import annotations

import datetime

from freescale import units
from freescale.pages.drawing import page
from freescale.pages.drawing.charts import Chart, Series
from freescale.pages.drawing.ticks import percent_labels
from freescale.pages.panels.run_charts import last_odd_one_wide, metric_label
from freescale.trace import Event, MetricsLog, column

_METRICS = ("hr@10", "ndcg@10", "auc")


def window_charts(log: MetricsLog) -> list[Chart]:
    """What every window brought, and how well it was foreseen."""
    if len(log.windows) < 2:
        return []
    numbers = [int(number or 0) for number in column(log.windows, "window")]
    tests = _tests(log)
    found = [tests.get(event.get("window"), {}) for event in log.windows]
    metrics = [name for name in log.eval_metrics() if name in _METRICS or name.startswith("auc/")]
    shares = [_unknown(test) for test in found]
    charts = [
        Chart(
            "Before it was learnt",
            numbers,
            [Series(metric_label(name), column(found, name), tone % 4) for tone, name in enumerate(metrics)],
            write=units.metric,
            from_zero=True,
            axis="window",
            measure="metric",
        ),
        Chart(
            "Targets of items nobody had met",
            numbers,
            [Series("share of the targets", shares, 1)],
            write=units.percent,
            tick=percent_labels,
            from_zero=True,
            axis="window",
            measure="share of the targets",
        ),
    ]
    drawn = [chart for chart in charts if any(v is not None for s in chart.series for v in s.values)]
    return last_odd_one_wide(drawn)


def window_panel(log: MetricsLog) -> str:
    """A row a window, where a run learns from a log."""
    if not log.windows:
        return ""
    tests = _tests(log)
    metrics = [name for name in log.eval_metrics() if name in _METRICS or name.startswith("auc/")]
    head = ["window", "until", "step", "rows", "new events", "late", "new items", "targets", "unknown items"]
    rows, items = [], 0.0
    for event in log.windows:
        known = units.number(event.get("items")) or 0.0
        test = tests.get(event.get("window"), {})
        cells = [units.whole(event.get("window")), _until(event)]
        cells += [units.whole(event.get(name)) for name in ("step", "rows", "events", "late")]
        cells += [f"{known - items:,.0f}", units.whole(event.get("targets")), _share(test)]
        cells += [
            "-" if (value := units.number(test.get(name))) is None else units.metric(value)
            for name in metrics
        ]
        rows.append(page.Row(cells))
        items = known
    said = (
        "Metrics are of each window before it was learnt, among the items of the catalogue until then. Unknown items "
        "are the share of its targets that nobody had met, or not for long: they are left out of rankings."
    )
    labels = [*head, *(metric_label(name) for name in metrics)]
    return page.table(labels, rows) + f'<p class="note">{said}</p>'


def _until(event: Event) -> str:
    moment = units.number(event.get("last"))
    if moment is None:
        return "-"
    try:
        return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return f"{moment:.0f}"


def _tests(log: MetricsLog) -> dict[object, Event]:
    """By window, how well it was foreseen."""
    return {event.get("window"): event for event in log.evals if event.get("split") == "next"}


def _unknown(test: Event) -> float | None:
    targets, unknown = units.number(test.get("targets")), units.number(test.get("unknown"))
    return None if not targets or unknown is None else unknown / targets


def _share(test: Event) -> str:
    share = _unknown(test)
    return "-" if share is None else units.percent(share)
