"""One run as one offline HTML page: what it learned, how fast, and where the time went.

Reading is in `metrics_log`, shapes in `charts`, the page in `page`; here is only what a run's report shows.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from freescale.errors import FreeScaleError
from freescale.trace import page, units
from freescale.trace.charts import Chart, Series, draw
from freescale.trace.metrics_log import (
    POPULARITY,
    Event,
    MetricsLog,
    column,
    numeric_fields,
    read_metrics,
    step_of,
)
from freescale.trace.smoothing import is_noisy, moving_average, moving_median

HEADLINE = "hr@10"
BUBBLE_PARTS = {
    "straggler": "waiting for the slowest rank",
    "comm": "exposed communication",
    "host": "host and the rest",
}
TITLES = {
    "hr": "Hit rate",
    "ndcg": "NDCG",
    "mrr": "Mean reciprocal rank",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "samples_per_s": "Samples per second",
    "memory_mb": "Memory (MB)",
}
ID_COUNTS = {
    "asked": "asked for, a step at a time",
    "hits": "had a row",
    "inserts": "got a row",
    "evictions": "lost theirs",
    "collisions": "shared a row: window full",
    "not_admitted": "shared a row: not admitted yet",
}
SHOWN_ELSEWHERE = frozenset({"loss", "step_ms", "tokens_per_s", "imbalance", "bubble", *BUBBLE_PARTS})


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write RUN_DIR/report.html from its config.yaml and metrics.jsonl; incomplete runs are reported as such.

    Args:
        run_dir: a folder that `freescale train` wrote, finished or not.

    Returns:
        The path of the page.

    Raises:
        FreeScaleError: the folder does not exist or no run was ever written to it.
    """
    folder = Path(run_dir)
    _require_run(folder)
    log = read_metrics(folder / "metrics.jsonl")
    html = render_report(folder.resolve().name, log, config=_config_text(folder))
    target = folder / "report.html"
    # Written aside and moved, so that a reader of an earlier report never sees half of this one.
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    aside.write_text(html, encoding="utf-8", errors="replace")
    aside.replace(target)
    return target


def render_report(name: str, log: MetricsLog, *, config: str | None) -> str:
    """The page of one run as text; every word of it that comes from the run is escaped."""
    no_config = ["config.yaml is missing: the configuration cannot be shown."] if config is None else []
    body = [
        page.missing(log.problems + no_config),
        page.cards(headline(log)),
        page.section("Training", _drawn([loss_chart(log)]), kind="charts"),
        page.section("Evaluation", _drawn(eval_charts(log)), kind="charts"),
        page.section("Every evaluation", eval_table(log), kind="panel"),
        page.section("Speed", _drawn(speed_charts(log)), kind="charts"),
        page.section("Bubbles", _drawn(bubble_charts(log)), kind="charts"),
        page.section("Ids", page.facts(id_facts(log)), kind="facts"),
        page.section("More curves", _drawn(other_charts(log)), kind="charts"),
        page.section("The run at its start", page.facts(log.facts()), kind="facts"),
        page.section("Configuration", f"<pre>{escape(config)}</pre>" if config else "", kind="panel"),
    ]
    finished = log.end is not None
    state = str((log.end or {}).get("status", "finished")) if finished else "not finished"
    header = page.heading(
        brand="FreeScale run", title=name, state=state, finished=finished, lines=[_protocol(log)]
    )
    return page.document(
        title=f"{name} - FreeScale", header=header, body=body, footer="Written by freescale report."
    )


def headline(log: MetricsLog) -> list[page.Card]:
    """The numbers a reader looks for first; what was not measured is shown as a dash, not left out."""
    return [
        _quality_card(log),
        _loss_card(log),
        _throughput_card(log),
        *_bubble_card(log),
        _steps_card(log),
        _time_card(log),
    ]


def loss_chart(log: MetricsLog) -> Chart:
    """The loss of every logged step and, once there are enough of them, its moving average."""
    return Chart("Loss", _steps(log.steps), _curves(log, "loss", averaged=True), write=units.loss, wide=True)


def eval_charts(log: MetricsLog) -> list[Chart]:
    """One chart per family of metrics (hr, ndcg, mrr, ...), each with its popularity baseline dashed."""
    families: dict[str, list[str]] = {}
    for metric in log.eval_metrics():
        families.setdefault(metric.partition("@")[0], []).append(metric)
    charts = []
    for family, metrics in families.items():
        curves = [
            Series(_label(metric), column(log.evals, metric), tone % 4) for tone, metric in enumerate(metrics)
        ]
        for tone, metric in enumerate(metrics):
            baseline = log.popularity(metric)
            if baseline is not None:
                flat = [baseline] * len(log.evals)
                curves.append(Series(f"{_label(metric)} popularity", flat, tone % 4, dashed=True))
        note = "Dashed: always recommending the most popular items." if len(curves) > len(metrics) else ""
        title = TITLES.get(family, _label(family))
        charts.append(Chart(title, _steps(log.evals), curves, note, units.metric, from_zero=True))
    return _last_odd_one_wide(charts)


def eval_table(log: MetricsLog) -> str:
    """Every evaluation in figures, the best one and the popularity baseline set off."""
    metrics = log.eval_metrics()
    if not metrics:
        return ""
    best = log.best(HEADLINE if HEADLINE in metrics else metrics[0])
    rows = []
    for event in log.evals:
        is_best = best is not None and step_of(event) == best[1]
        rows.append(page.Row([f"{step_of(event):,}", *_cells(event, metrics)], "best" if is_best else ""))
    if log.test is not None:
        rows.append(page.Row(["test", *_cells(log.test, metrics)], "best"))
    baseline = [log.popularity(metric) for metric in metrics]
    if any(value is not None for value in baseline):
        cells = ["-" if value is None else units.metric(value) for value in baseline]
        rows.append(page.Row(["popularity", *cells], "baseline"))
    return page.table(["step", *map(_label, metrics)], rows)


def speed_charts(log: MetricsLog) -> list[Chart]:
    """Throughput, step time and how even the ranks were loaded."""
    steps = _steps(log.steps)
    note = "Work of the busiest rank over the mean of all ranks; 1 is perfect."
    charts = [
        Chart("Tokens per second", steps, _curves(log, "tokens_per_s"), from_zero=True),
        Chart("Step time (ms)", steps, _curves(log, "step_ms", 2), write=units.milliseconds, from_zero=True),
        Chart("Balance", steps, _curves(log, "imbalance", 3), note, write=lambda value: f"{value:.3f}"),
    ]
    return _last_odd_one_wide([chart for chart in charts if _has_values(chart)])


def bubble_charts(log: MetricsLog) -> list[Chart]:
    """The share of each step in which the GPU computed nothing, split by cause where that was measured."""
    shares = {name: column(log.steps, key) for key, name in BUBBLE_PARTS.items()}
    span = _span(log.steps) if any(is_noisy(values) for values in shares.values()) else 1
    parts = [
        Series(name, moving_average(values, span=span), tone)
        for tone, (name, values) in enumerate(shares.items(), 1)
    ]
    measured = [part for part in parts if any(value is not None for value in part.values)]
    title, percent = "Share of the step in which nothing was computed", units.percent
    note = f"Averages of {span} logged steps, one part on top of the other." if measured and span > 1 else ""
    curves = measured or _curves(log, "bubble", 1, averaged=True)
    stacked = bool(measured)
    return [Chart(title, _steps(log.steps), curves, note, percent, percent, True, stacked, wide=True)]


def id_facts(log: MetricsLog) -> dict[str, dict[str, object]]:
    """The id map as it was last seen, and what happened to ids over the whole run; nothing if ids are not learnt."""
    if not log.ids:
        return {}
    last = log.ids[-1]
    totals = {name: sum(value or 0 for value in column(log.ids, name)) for name in ID_COUNTS}
    table: dict[str, object] = {
        "slots": last.get("slots"),
        "taken": units.percent(column([last], "occupancy")[0] or 0.0),
        **{meaning: f"{totals[name]:,.0f}" for name, meaning in ID_COUNTS.items()},
    }
    sections = {f"at step {step_of(last):,}": table}
    for name, title in {
        "probe_histogram": "slots from home",
        "age_histogram": "steps since last use",
    }.items():
        counts = last.get(name)
        if isinstance(counts, dict) and counts:
            sections[title] = {f"{span}": f"{count:,} ids" for span, count in counts.items()}
    return sections


def other_charts(log: MetricsLog) -> list[Chart]:
    """Whatever else the run logged with every step: learning rate, memory, id map statistics."""
    names = [name for name in numeric_fields(log.steps) if name not in SHOWN_ELSEWHERE]
    titles = {name: TITLES.get(name, name.replace("_", " ").capitalize()) for name in names}
    charts = [Chart(titles[name], _steps(log.steps), _curves(log, name), from_zero=True) for name in names]
    return _last_odd_one_wide(charts)


def _cells(event: Event, metrics: Sequence[str]) -> list[str]:
    values = (column([event], metric)[0] for metric in metrics)
    return ["-" if value is None else units.metric(value) for value in values]


def _quality_card(log: MetricsLog) -> page.Card:
    names = log.eval_metrics()
    metric = HEADLINE if HEADLINE in names or not names else names[0]
    if log.test is not None and (value := column([log.test], metric)[0]) is not None:
        baseline = column([log.test], POPULARITY + metric)[0]
        times = units.factor(value, baseline)
        over = f"{times} popularity ({units.metric(baseline)})" if times and baseline is not None else ""
        return page.Card(f"Test {_label(metric)}", units.metric(value), over)
    best = log.best(metric)
    if best is None:
        return page.Card(f"Best {_label(metric)}", "-", "not evaluated yet")
    baseline = log.popularity(metric)
    times = units.factor(best[0], baseline)
    over = f"{times} popularity ({units.metric(baseline)}), " if times and baseline is not None else ""
    return page.Card(f"Best {_label(metric)}", units.metric(best[0]), f"{over}step {best[1]:,}")


def _loss_card(log: MetricsLog) -> page.Card:
    losses = [loss for loss in column(log.steps, "loss") if loss is not None]
    if not losses:
        return page.Card("Final loss", "-", "no finite loss logged")
    return page.Card("Final loss", units.loss(losses[-1]), f"from {units.loss(losses[0])}")


def _throughput_card(log: MetricsLog) -> page.Card:
    rates = [rate for rate in column(log.steps, "tokens_per_s") if rate is not None]
    if not rates:
        return page.Card("Tokens per second", "-", "not measured")
    return page.Card("Tokens per second", units.count(round(statistics.median(rates))), "median of all steps")


def _bubble_card(log: MetricsLog) -> list[page.Card]:
    shares = [share for share in column(log.steps, "bubble") if share is not None]
    context = "median share of a step not computing"
    return [page.Card("Bubble", units.percent(statistics.median(shares)), context)] if shares else []


def _steps_card(log: MetricsLog) -> page.Card:
    # A run resumed with more steps outgrows the plan in its start event.
    planned = max(units.number(log.start.get("total_steps")) or 0, log.last_step)
    return page.Card("Steps", f"{log.last_step:,}", f"of {planned:,.0f}")


def _time_card(log: MetricsLog) -> page.Card:
    seconds = units.number((log.end or {}).get("seconds"))
    if seconds is not None:
        return page.Card("Wall time", units.long_duration(seconds), "with evaluation and saving")
    times = [time for time in column([log.start, *log.steps, *log.evals], "time") if time is not None]
    if len(times) > 1:
        return page.Card("Wall time", units.long_duration(max(times) - min(times)), "first to last event")
    step_ms = [value for value in column(log.steps, "step_ms") if value is not None]
    if not step_ms:
        return page.Card("Wall time", "-", "not measured")
    estimate = statistics.median(step_ms) / 1000 * log.last_step
    return page.Card("Wall time", f"about {units.long_duration(estimate)}", "steps times median step time")


def _curves(log: MetricsLog, key: str, tone: int = 0, *, averaged: bool = False) -> list[Series]:
    """A field of every logged step; if it is noisy it is drawn faint, with its usual course over it."""
    values = column(log.steps, key)
    if not is_noisy(values):
        return [Series("each logged step", values, tone)]
    span = _span(values)
    course = moving_average(values, span=span) if averaged else moving_median(values, span=span)
    name = f"{'average' if averaged else 'median'} of {span}"
    return [Series("each logged step", values, tone, faint=True), Series(name, course, tone)]


def _span(logged: Sequence[object]) -> int:
    """How many steps a smoothed point sees: a fortieth of the run, never so many that it takes long."""
    return min(201, max(5, len(logged) // 40 // 2 * 2 + 1))


def _drawn(charts: Iterable[Chart]) -> str:
    return "".join(draw(chart) for chart in charts)


def _has_values(chart: Chart) -> bool:
    return any(value is not None for series in chart.series for value in series.values)


def _last_odd_one_wide(charts: list[Chart]) -> list[Chart]:
    """Charts stand two abreast; one left over takes the whole row rather than leave a hole."""
    if len(charts) % 2:
        charts[-1] = replace(charts[-1], wide=True)
    return charts


def _steps(events: Iterable[dict[str, object]]) -> list[int]:
    return [step_of(event) or 0 for event in events]


def _label(metric: str) -> str:
    """`hr@10` as the literature writes it, HR@10."""
    return (
        metric.upper() if metric.partition("@")[0] in {"hr", "ndcg", "mrr", "auc", "gauc", "ne"} else metric
    )


def _protocol(log: MetricsLog) -> str:
    protocol = log.evals[-1].get("protocol") if log.evals else None
    return f"Evaluation: {protocol}" if protocol else ""


def _config_text(folder: Path) -> str | None:
    try:
        return (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _require_run(folder: Path) -> None:
    if any((folder / name).is_file() for name in ("metrics.jsonl", "config.yaml")):
        return
    what = "This folder holds no run" if folder.is_dir() else "There is no such run folder"
    runs = sorted(str(log.parent) for log in folder.parent.glob("*/metrics.jsonl"))
    raise FreeScaleError(
        what,
        got=str(folder),
        allowed="a folder written by `freescale train`"
        + (f", such as {', '.join(runs[:5])}" if runs else ""),
        next_step=f"freescale report {runs[-1]}" if runs else f"freescale train run.out={folder}",
    )
