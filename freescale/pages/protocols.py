"""Whether the quality of two runs can be compared: only where both were judged alike."""

from __future__ import annotations

from freescale import units
from freescale.pages import page
from freescale.pages.run_charts import metric_label
from freescale.trace import Event, MetricsLog, column


def protocol_doubts(
    before: MetricsLog, after: MetricsLog, *, names: tuple[str, str] = ("before", "after")
) -> list[str]:
    """What keeps the metrics of two runs of these names from being compared, in plain words."""
    pair = _judged(before, after)
    if pair is None or _protocol(pair[0]) == _protocol(pair[1]):
        return []
    return [
        "The runs were not judged alike, so their metrics are not compared: "
        f"{names[0]}: {_protocol(pair[0])}; {names[1]}: {_protocol(pair[1])}."
    ]


def quality_lines(before: MetricsLog, after: MetricsLog) -> list[str]:
    """The first metric of both runs for a terminal, where they were judged alike."""
    return [
        f"{name} {units.metric(was)} -> {units.metric(now)}" for name, was, now in _quality(before, after)
    ]


def quality_cards(before: MetricsLog, after: MetricsLog, *, baseline: str) -> list[page.Card]:
    """The same for a page; the earlier run is called `baseline`."""
    return [
        page.Card(name, units.metric(now), f"{baseline} {units.metric(was)}")
        for name, was, now in _quality(before, after)
    ]


def _quality(before: MetricsLog, after: MetricsLog) -> list[tuple[str, float, float]]:
    """(name, before, after) of the first metric both have, from test targets where both were tested."""
    pair = _judged(before, after)
    if pair is None or protocol_doubts(before, after):
        return []
    place = "test" if pair[0].get("split") == "test" else "validation"
    for name in before.eval_metrics():
        was, now = (column([event], name)[0] for event in pair)
        if was is not None and now is not None:
            return [(f"{place} {metric_label(name)}", was, now)]
    return []


def _judged(before: MetricsLog, after: MetricsLog) -> tuple[Event, Event] | None:
    """The evaluations to hold against each other: the tests, or the last ones on the way."""
    if before.test is not None and after.test is not None:
        return before.test, after.test
    return (before.evals[-1], after.evals[-1]) if before.evals and after.evals else None


def _protocol(event: Event) -> str:
    return str(event.get("protocol") or "not said how")
