"""Whether the quality of two runs can be compared: only where both were judged alike."""

from __future__ import annotations

from freescale import units
from freescale.pages.drawing import page
from freescale.pages.panels.run_charts import metric_label
from freescale.trace import Event, MetricsLog, column, step_of

Named = tuple[str, MetricsLog]
"""A run: its name and its log."""


def protocol_doubts(base: Named, run: Named) -> list[str]:
    """What keeps the metrics of two runs from being compared, in plain words."""
    pair = _judged(base[1], run[1])
    if pair is None or _protocol(pair[0]) == _protocol(pair[1]):
        return []
    return [
        "The runs were not judged alike, so their metrics are not compared: "
        f"{base[0]} by {_protocol(pair[0])}; {run[0]} by {_protocol(pair[1])}."
    ]


def quality_lines(base: Named, run: Named) -> list[str]:
    """The first metric of both runs for a terminal, where they were judged alike."""
    return [f"{name} {units.metric(was)} -> {units.metric(now)}" for name, was, now in _quality(base, run)]


def quality_cards(base: Named, run: Named) -> list[page.Card]:
    """The same for a page."""
    return [
        page.Card(name, units.metric(now), f"{base[0]} {units.metric(was)}")
        for name, was, now in _quality(base, run)
    ]


def _quality(base: Named, run: Named) -> list[tuple[str, float, float]]:
    """(name, before, after) of the first metric both have, from test targets where both were tested."""
    pair = _judged(base[1], run[1])
    if pair is None or protocol_doubts(base, run):
        return []
    step = step_of(pair[1]) or 0
    place, when = ("Test", "") if pair[0].get("split") == "test" else ("Validation", f" at step {step:,}")
    for name in base[1].eval_metrics():
        was, now = (column([event], name)[0] for event in pair)
        if was is not None and now is not None:
            return [(f"{place} {metric_label(name)}{when}", was, now)]
    return []


def _judged(before: MetricsLog, after: MetricsLog) -> tuple[Event, Event] | None:
    """The evaluations to hold against each other: the tests, or those at the last step where both have one."""
    if before.test is not None and after.test is not None:
        return before.test, after.test
    first = {step_of(event) or 0: event for event in before.evals}
    common = [(first[step], event) for event in after.evals if (step := step_of(event) or 0) in first]
    return common[-1] if common else None


def _protocol(event: Event) -> str:
    return str(event.get("protocol") or "a protocol it does not name")
