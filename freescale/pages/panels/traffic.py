"""What a report says of rows on their way: how many the step before used, too, what is hidden, and when that ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from freescale import units
from freescale.pages.drawing.charts import Band, Chart, draw
from freescale.pages.drawing.ticks import percent_labels, plain_labels
from freescale.pages.panels.run_charts import TRAFFIC, curves_of, field_charts, last_odd_one_wide, steps_of
from freescale.trace import Event, MetricsLog, column, numeric_fields, step_of

MOST_DECISIONS = 5
"""Of many decisions the last ones are told: they say how the run goes now."""


@dataclass(frozen=True)
class _Field:
    title: str
    measure: str
    caption: str
    write: Callable[[float], str] = units.count
    tick: Callable[[Sequence[float]], list[str]] = plain_labels
    ends: bool = False


FIELDS = {
    "overlap": _Field(
        "Overlap with the step before",
        "share of the rows",
        "Of the unique rows of a step, the share that the step before used, too. Only these wait for its update; the "
        "others are fetched under its compute.",
        units.percent,
        percent_labels,
        ends=True,
    ),
    "parked_rows": _Field(
        "Parked rows",
        "rows",
        "Rows whose gradients the next step does not need: they travel under its compute. All ranks together.",
        ends=True,
    ),
    "exposed_bytes": _Field(
        "Exposed bytes", "bytes", "Sent and received while ranks stood still; all ranks together."
    ),
    "hidden_bytes": _Field("Hidden bytes", "bytes", "Sent and received under compute; all ranks together."),
    "exposed_ms": _Field(
        "Exposed time",
        "milliseconds",
        "Time a rank stood still for rows, gradients and ids, or prepared them; mean over ranks.",
        units.milliseconds,
    ),
    "split_ms": _Field(
        "Split time",
        "milliseconds",
        "Time to tell the rows that wait from those that need not, on the communication thread, under compute; mean "
        "over ranks.",
        units.milliseconds,
        ends=True,
    ),
    "busiest_owner": _Field(
        "Busiest owner",
        "times the mean",
        "Bytes of rows that the busiest rank sends as their owner, against the mean over ranks. Popular rows that one "
        "rank owns make it more than 1, and all others wait for it.",
        lambda times: f"{times:.2f}",
    ),
}
"""Fields of a step; `ends` marks those that fall to zero where rows are not split."""


def traffic_section(log: MetricsLog) -> str:
    """Charts of the traffic of rows, each with a caption, and what was decided about splitting them."""
    present = numeric_fields(log.steps)
    plain = plain_stretches(log)
    known = [_chart(log, name, plain) for name in FIELDS if name in present]
    others = [chart for name in present if name not in FIELDS for chart in _others(log, name)]
    if not known and not others:
        return ""
    said = "".join(f'<p class="note wide">{escape(line)}</p>' for line in decisions(log, plain))
    return said + "".join(map(draw, last_odd_one_wide([*known, *others])))


def plain_stretches(log: MetricsLog) -> list[Band]:
    """Successive logged steps in which nothing was split: the plain way, tried or chosen."""
    rows = list(zip(steps_of(log.steps), column(log.steps, "overlap"), column(log.steps, "split_ms")))
    stretches = []
    for plain, group in groupby(rows, key=lambda row: row[1] == 0 and row[2] == 0):
        steps = [step for step, _, _ in group]
        # The first step has none before it to share rows with.
        if plain and steps != [1]:
            stretches.append(Band(steps[0], steps[-1]))
    return stretches


def decisions(log: MetricsLog, plain: Sequence[Band]) -> list[str]:
    """Why splitting stopped, paused or went on, in sentences."""
    last = log.steps and step_of(log.steps[-1])
    if plain and plain[0].first <= 2 and plain[0].last == last:
        return ["Rows were not split in this run: overlap, parked rows and split time stay at zero."]
    lines = [_decision(event) for event in log.pipeline]
    left_out = len(lines) - MOST_DECISIONS
    if left_out > 0:
        lines = [f"{left_out} earlier tries are not listed.", *lines[-MOST_DECISIONS:]]
    if plain and not lines:
        lines = [f"{_where(plain)} went the plain way, without splitting rows."]
    return lines


def _decision(event: Event) -> str:
    on, off = (units.number(event.get(name)) or 0.0 for name in ("prioritized_ms", "plain_ms"))
    way, other = ("prioritized", "plain") if event.get("prioritized") else ("plain", "prioritized")
    step, since = step_of(event) or 0, int(units.number(event.get("from_step")) or 0)
    times = f"{units.milliseconds(on)} a step prioritized, {units.milliseconds(off)} plain"
    if not event.get("changed"):
        return f"Up to step {step:,} {other} communication was tried: {times}. The run stays {way}."
    ends = " Overlap, parked rows and split time end there." if way == "plain" else ""
    return f"From step {since:,} on the run is {way}, which was faster: {times}.{ends}"


def _chart(log: MetricsLog, name: str, plain: Sequence[Band]) -> Chart:
    field = FIELDS[name]
    bands = plain if field.ends else ()
    shaded = f" Shaded: {_where(plain, few=True)}, the plain way, in which nothing is split." if bands else ""
    return Chart(
        field.title,
        steps_of(log.steps),
        curves_of(log, name),
        field.caption + shaded,
        write=field.write,
        tick=field.tick,
        from_zero=True,
        measure=field.measure,
        bands=bands,
    )


def _others(log: MetricsLog, name: str) -> list[Chart]:
    """Further fields of the same kind, of runs that log more."""
    return field_charts(log, (name,)) if name.startswith(TRAFFIC) else []


def _where(bands: Sequence[Band], *, few: bool = False) -> str:
    shown = [
        f"{band.first:,.0f}" if band.first == band.last else f"{band.first:,.0f} to {band.last:,.0f}"
        for band in bands[:3]
    ]
    more = f" and {len(bands) - 3} more stretches" if len(bands) > 3 else ""
    return f"{'steps' if few else 'Steps'} {', '.join(shown)}{more}"
