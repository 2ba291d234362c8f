"""The curves of a run: what is drawn of its events, whichever page it is drawn on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from freescale import units
from freescale.pages.drawing.charts import Chart, Series
from freescale.pages.drawing.smoothing import is_noisy, moving_average, moving_median
from freescale.pages.drawing.ticks import percent_labels
from freescale.pages.panels.task_tables import TASK_TITLES, of_tasks
from freescale.trace import BASELINES, CAUSES, WORDS, MetricsLog, column, numeric_fields, step_of

BUBBLE_PARTS = {cause: WORDS[cause] for cause in CAUSES}
TRAFFIC = ("overlap", "exposed", "hidden", "parked", "split_ms", "busiest_owner", "traffic", "embedding_")
IDS = ("id_",)
EXPERTS = ("expert_",)
"""How names of step fields begin that a feature logs about itself; each has a section of its own."""

TITLES = {
    "hr": "Hit rate",
    "ndcg": "NDCG",
    "mrr": "Mean reciprocal rank",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "samples_per_s": "Samples per second",
    "memory_mb": "Memory (MB)",
    "bound": "What no plan can beat",
    "epoch": "Epoch",
    "expert_max": "Fullest expert over the mean",
    "expert_entropy": "Entropy of the load, 1 is even",
    "expert_dead": "Experts without a token in the step",
    "expert_aux": "Balance loss, 1 is even",
    "expert_z": "Mean squared logsumexp of the router",
}
MEASURES = {
    "lr": "learning rate",
    "grad_norm": "norm",
    "samples_per_s": "samples per second",
    "memory_mb": "MB",
    "bound": "busiest rank / mean",
    "expert_max": "fullest / mean",
    "expert_entropy": "entropy",
    "expert_dead": "experts",
    "expert_aux": "loss",
    "expert_z": "logsumexp²",
}
"""What stands beside the vertical axis, where it is not the name of the field."""

CAPTIONS = {
    "bound": "Work of the busiest rank over the mean, if only the longest sample counted; 1: it is in nobody's way.",
}
AT_LEAST = {"bound": (1.0, 1.01)}
SHOWN_ELSEWHERE = frozenset(
    {"loss", "step_ms", "tokens_per_s", "imbalance", "imbalance_in_turn", "slowest", "bubble", *BUBBLE_PARTS}
)


def loss_chart(log: MetricsLog) -> Chart:
    """The loss of every logged step and, once there are enough of them, its moving average."""
    curves = curves_of(log, "loss", averaged=True)
    return Chart("Loss", steps_of(log.steps), curves, write=units.loss, wide=True, measure="loss")


def eval_charts(log: MetricsLog) -> list[Chart]:
    """One chart per family of metrics (hr, ndcg, mrr, ...), each with its baselines dashed."""
    names = log.eval_metrics()
    families: dict[str, list[str]] = {}
    tasks = of_tasks(names)
    for metric in () if tasks else names:
        families.setdefault(metric.partition("@")[0], []).append(metric)
    families |= tasks
    charts = []
    for family, metrics in families.items():
        curves = [
            Series(metric.partition("/")[2] or metric_label(metric), column(log.evals, metric), tone % 4)
            for tone, metric in enumerate(metrics)
        ]
        for tone, metric in enumerate(metrics):
            for prefix, words in BASELINES.items():
                baseline = log.baseline(metric, prefix)
                if baseline is not None:
                    flat = [baseline] * len(log.evals)
                    curves.append(Series(f"{metric_label(metric)} {words}", flat, tone % 4, dashed=True))
        note = _baseline_note(curves)
        title = {**TITLES, **TASK_TITLES}.get(family, metric_label(family))
        steps, name = steps_of(log.evals), metric_label(family)
        charts.append(Chart(title, steps, curves, note, units.metric, from_zero=True, measure=name))
    return last_odd_one_wide(charts)


def _baseline_note(curves: Sequence[Series]) -> str:
    """What the dashed curves are."""
    words = {
        "popularity": "always recommending the most popular items",
        "repeat last": "recommending a user's own items again, the last one first",
    }
    drawn = [text for name, text in words.items() if any(curve.name.endswith(name) for curve in curves)]
    return f"Dashed: {'; '.join(drawn)}." if drawn else ""


def speed_charts(log: MetricsLog) -> list[Chart]:
    """Throughput, step time and how even the ranks were loaded."""
    steps = steps_of(log.steps)
    note = "Work of the busiest rank over the mean of all ranks; 1 is perfect."
    charts = [
        Chart(
            "Tokens per second",
            steps,
            curves_of(log, "tokens_per_s"),
            from_zero=True,
            measure="tokens per second",
        ),
        Chart(
            "Step time",
            steps,
            curves_of(log, "step_ms", 2),
            write=units.milliseconds,
            from_zero=True,
            measure="milliseconds",
        ),
        Chart(
            "Balance",
            steps,
            curves_of(log, "imbalance", 3),
            note,
            write=_factor,
            measure="busiest rank / mean",
            at_least=(1.0, 1.01),
        ),
    ]
    return last_odd_one_wide([chart for chart in charts if _has_values(chart)])


def bubble_charts(log: MetricsLog) -> list[Chart]:
    """The share of each step in which the GPU computed nothing, split by cause where that was measured."""
    shares = {name: column(log.steps, key) for key, name in BUBBLE_PARTS.items()}
    span = _span(log.steps) if any(is_noisy(values) for values in shares.values()) else 1
    parts = [
        Series(name, moving_average(values, span=span), tone)
        for tone, (name, values) in enumerate(shares.items(), 1)
    ]
    measured = [part for part in parts if any(value is not None for value in part.values)]
    title = "Share of the step in which nothing was computed"
    note = f"Averages of {span} logged steps, one part on top of the other." if measured and span > 1 else ""
    curves = measured or curves_of(log, "bubble", 1, averaged=True)
    return [
        Chart(
            title,
            steps_of(log.steps),
            curves,
            note,
            write=units.percent,
            tick=percent_labels,
            from_zero=True,
            stacked=bool(measured),
            wide=True,
            measure="share of the step",
        )
    ]


def other_charts(log: MetricsLog) -> list[Chart]:
    """Whatever else the run logged with every step: learning rate, memory, id map statistics."""
    names = [name for name in numeric_fields(log.steps) if name not in SHOWN_ELSEWHERE]
    return _field_charts(log, [name for name in names if not name.startswith((*TRAFFIC, *IDS, *EXPERTS))])


def field_charts(log: MetricsLog, prefixes: tuple[str, ...]) -> list[Chart]:
    """The fields of step events whose names begin so: id map statistics, experts."""
    return _field_charts(log, [name for name in numeric_fields(log.steps) if name.startswith(prefixes)])


def _field_charts(log: MetricsLog, names: Sequence[str]) -> list[Chart]:
    charts = [
        Chart(
            TITLES.get(name, name.replace("_", " ").capitalize()),
            steps_of(log.steps),
            curves_of(log, name),
            CAPTIONS.get(name, ""),
            from_zero=name not in AT_LEAST,
            measure=MEASURES.get(name, name.replace("_", " ")),
            at_least=AT_LEAST.get(name),
        )
        for name in names
    ]
    return last_odd_one_wide(charts)


def curves_of(log: MetricsLog, key: str, tone: int = 0, *, averaged: bool = False) -> list[Series]:
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


def _has_values(chart: Chart) -> bool:
    return any(value is not None for series in chart.series for value in series.values)


def last_odd_one_wide(charts: list[Chart]) -> list[Chart]:
    """Charts stand two abreast; one left over takes the whole row rather than leave a hole."""
    if len(charts) % 2:
        charts[-1] = replace(charts[-1], wide=True)
    return charts


def steps_of(events: Iterable[dict[str, object]]) -> list[int]:
    """The step of every event."""
    return [step_of(event) or 0 for event in events]


def metric_label(metric: str) -> str:
    """`hr@10` as the literature writes it, HR@10."""
    return (
        metric.upper() if metric.partition("@")[0] in {"hr", "ndcg", "mrr", "auc", "gauc", "ne"} else metric
    )


def _factor(value: float) -> str:
    return f"{value:.4f}"
