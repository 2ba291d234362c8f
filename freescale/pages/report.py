"""One run as one offline HTML page: what it learned, how fast, and where the time went.

Reading is in `metrics_log`, shapes in `charts`, the page in `page`; here is only what a run's report shows.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from freescale import units
from freescale.errors import FreeScaleError
from freescale.pages.drawing import page
from freescale.pages.drawing.charts import Chart, draw
from freescale.pages.drawing.timeline import draw_timeline
from freescale.pages.panels.expert_facts import expert_facts
from freescale.pages.panels.id_facts import id_facts
from freescale.pages.panels.run_charts import (
    EXPERTS,
    IDS,
    bubble_charts,
    eval_charts,
    field_charts,
    loss_chart,
    metric_label,
    other_charts,
    speed_charts,
)
from freescale.pages.panels.run_header import run_header
from freescale.pages.panels.table_panel import table_panel
from freescale.pages.panels.task_tables import of_tasks, task_table
from freescale.pages.panels.time_panels import balance_panel, headline_panel, rank_bars
from freescale.pages.panels.traffic import traffic_section
from freescale.pages.panels.version_panel import version_charts, version_panel
from freescale.pages.panels.window_panel import window_charts, window_panel
from freescale.trace import (
    BASELINES,
    CAUSES,
    POPULARITY,
    WORDS,
    Event,
    MetricsLog,
    RunSpans,
    account_of,
    column,
    device_sentence,
    lateness,
    rank_parts,
    read_metrics,
    read_published,
    read_spans,
    slowest_of_steps,
    step_of,
    whole_file,
    write_trace,
)

HEADLINE = "hr@10"


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
    require_run(folder)
    log = read_metrics(folder / "metrics.jsonl")
    spans = read_spans(folder)
    html = render_report(
        folder.resolve().name,
        log,
        spans=spans,
        config=config_text(folder),
        published=read_published(folder),
    )
    if spans.ranks:
        write_trace(folder / "trace.json", spans)
    return replace_file(folder / "report.html", html)


def replace_file(target: Path, text: str) -> Path:
    """Write a file aside and move it, so that a reader of an earlier one never sees half of this one."""
    with whole_file(target) as file:
        file.write(text)
    return target


def render_report(
    name: str,
    log: MetricsLog,
    *,
    config: str | None,
    spans: RunSpans | None = None,
    published: Sequence[Event] = (),
    live: str | None = None,
    going: str = "not finished",
) -> str:
    """The page of one run as text; every word of it that comes from the run is escaped.

    Args:
        name: of the run.
        log: its events.
        config: its recipe as text.
        spans: its timelines.
        published: the versions published of it.
        live: of a page that follows the run, the version of what it shows.
        going: what is said of a run that has not ended.
    """
    no_config = ["config.yaml is missing: the configuration cannot be shown."] if config is None else []
    spans = spans or RunSpans()
    timeline = draw_timeline(spans.ranks)
    # A live page may get its first timeline later.
    scripts = ("report.js", "timeline.js") if timeline or live is not None else ("report.js",)
    body = [
        page.missing(log.problems + no_config + spans.problems),
        page.cards(headline(log)),
        page.section("Where the time went", time_panel(log, spans), kind="panel"),
        page.section("Timeline", timeline, kind="panel"),
        page.section("Rank by rank", rank_panel(log, spans), kind="panel"),
        page.section("Bubbles over the run", _drawn(bubble_charts(log)), kind="charts"),
        page.section("Training", _drawn([loss_chart(log)]), kind="charts"),
        page.section("Evaluation", _drawn(eval_charts(log)), kind="charts"),
        page.section("Every evaluation", eval_table(log), kind="panel"),
        page.section("Windows", _drawn(window_charts(log)), kind="charts"),
        page.section("Window by window", window_panel(log), kind="panel"),
        page.section("Published versions", _drawn(version_charts(published)), kind="charts"),
        page.section("Version by version", version_panel(published), kind="panel"),
        page.section("Speed", _drawn(speed_charts(log)), kind="charts"),
        page.section("Balance", balance_histogram(log), kind="panel"),
        page.section("Embedding traffic", traffic_section(log), kind="charts"),
        page.section("Tables", table_panel(log), kind="panel"),
        page.section("Zero-collision ids", page.facts(id_facts(log)), kind="facts"),
        page.section("Ids, step by step", _drawn(field_charts(log, IDS)), kind="charts"),
        page.section("Experts", page.facts(expert_facts(log)), kind="facts"),
        page.section("Experts, step by step", _drawn(field_charts(log, EXPERTS)), kind="charts"),
        page.section("More curves", _drawn(other_charts(log)), kind="charts"),
        page.section("The run at its start", page.facts(log.facts()), kind="facts"),
        page.folded("Configuration", f'<pre tabindex="0">{escape(config)}</pre>' if config else ""),
    ]
    return page.document(
        title=f"{name} - FreeScale",
        header=run_header(name, log, going=going),
        body=body,
        footer="Written by freescale report." if live is None else "Shown by freescale report --live.",
        scripts=scripts if live is None else (*scripts, "live.js"),
        policy=page.POLICY if live is None else page.LIVE_POLICY,
        version=live or "",
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


def eval_table(log: MetricsLog) -> str:
    """Every evaluation in figures, the best one and the popularity baseline set off."""
    metrics = log.eval_metrics()
    if not metrics:
        return ""
    best = log.best(_deciding(log))
    if of_tasks(metrics):
        return task_table(log, None if best is None else best[1])
    rows = []
    for event in log.evals:
        is_best = best is not None and step_of(event) == best[1]
        rows.append(page.Row([f"{step_of(event):,}", *_cells(event, metrics)], "best" if is_best else ""))
    of_valid: dict[str, object] = {
        prefix + name: log.baseline(name, prefix) for prefix in BASELINES for name in metrics
    }
    rows += _baselines(of_valid, metrics, "" if log.test is None else ", validation")
    if log.test is not None:
        rows.append(page.Row(["test", *_cells(log.test, metrics)], "best"))
        rows += _baselines(log.test, metrics, ", test")
    return page.table(["step", *map(metric_label, metrics)], rows)


def _baselines(event: Event, metrics: Sequence[str], behind: str) -> list[page.Row]:
    """What is reached without a model on the targets of an evaluation, where the run measured it."""
    found = {words: _cells(event, [prefix + name for name in metrics]) for prefix, words in BASELINES.items()}
    return [
        page.Row([words + behind, *cells], "baseline") for words, cells in found.items() if {*cells} != {"-"}
    ]


def time_panel(log: MetricsLog, spans: RunSpans) -> str:
    """The headline of the time account."""
    account = account_of(log.steps)
    if account is None:
        return ""
    said = (lateness(rank_parts(log, spans), slowest_of_steps(log)), device_sentence(log, account))
    return headline_panel(account, " ".join(filter(None, said)))


def rank_panel(log: MetricsLog, spans: RunSpans) -> str:
    """A bar a rank, where there are several."""
    ranks = rank_parts(log, spans)
    return rank_bars(ranks, clock_error=(log.ranks or {}).get("clock_error")) if len(ranks) > 1 else ""


def balance_histogram(log: MetricsLog) -> str:
    """Planned idle time with and without balance."""
    columns = (column(log.steps, "imbalance_in_turn"), column(log.steps, "imbalance"))
    pairs = [(was, now) for was, now in zip(*columns) if was is not None and now is not None]
    return balance_panel([was for was, _ in pairs], [now for _, now in pairs])


def _cells(event: Event, metrics: Sequence[str]) -> list[str]:
    values = (column([event], metric)[0] for metric in metrics)
    return ["-" if value is None else units.metric(value) for value in values]


def _deciding(log: MetricsLog) -> str:
    """The metric that chose the best state, where the run has said it at its end; else the one people know."""
    names = log.eval_metrics()
    said = str((log.end or {}).get("best_metric") or "").removeprefix("test ")
    if said in names:
        return said
    return HEADLINE if HEADLINE in names or not names else names[0]


def _quality_card(log: MetricsLog) -> page.Card:
    metric = _deciding(log)
    if log.test is not None and (value := column([log.test], metric)[0]) is not None:
        baseline = column([log.test], POPULARITY + metric)[0]
        times = units.factor(value, baseline)
        over = f"{times} popularity ({units.metric(baseline)})" if times and baseline is not None else ""
        return page.Card(f"Test {metric_label(metric)}", units.metric(value), over)
    best = log.best(metric)
    if best is None:
        return page.Card(
            f"Best {metric_label(metric)}",
            "-",
            "never evaluated" if log.end is not None else "not evaluated yet",
        )
    baseline = log.popularity(metric)
    times = units.factor(best[0], baseline)
    over = f"{times} popularity ({units.metric(baseline)}), " if times and baseline is not None else ""
    return page.Card(f"Best {metric_label(metric)}", units.metric(best[0]), f"{over}step {best[1]:,}")


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
    account = account_of(log.steps)
    if account is not None:
        largest = max(CAUSES, key=lambda cause: account.shares[cause])
        context = f"mostly {WORDS[largest]}"
        return [page.Card("Bubble", units.percent(account.bubble), context)]
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


def _drawn(charts: Iterable[Chart]) -> str:
    return "".join(draw(chart) for chart in charts)


def config_text(folder: Path) -> str | None:
    """The recipe of a run as it stands in its folder; None without one."""
    try:
        return (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def require_run(folder: Path) -> None:
    """Refuse a folder that holds no run, and name those there are."""
    if any((folder / name).is_file() for name in ("metrics.jsonl", "config.yaml")):
        return
    what = "This folder holds no run" if folder.is_dir() else "There is no such run folder"
    runs = sorted(str(log.parent) for log in folder.parent.glob("*/metrics.jsonl"))
    raise FreeScaleError(
        what,
        got=str(folder),
        allowed="a folder written by `freescale train`"
        + (f", such as {', '.join(runs[:5])}" if runs else ""),
        next_step=f"freescale report {runs[-1]}" if runs else "freescale train run.out=NEW_FOLDER",
    )
