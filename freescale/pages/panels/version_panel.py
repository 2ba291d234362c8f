"""Published versions of a run: how large deltas are, how long they take, and how old new items are that they bring."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from freescale import units
from freescale.pages.drawing import page
from freescale.pages.drawing.charts import Chart, Series
from freescale.pages.panels.run_charts import last_odd_one_wide
from freescale.trace import Event, column

_SHOWN = 50
"""Versions in the table, the latest; charts have all."""
_DAY = 86_400.0


def version_charts(published: Sequence[Event]) -> list[Chart]:
    """Size and time of every version, and the age of what it recommends for the first time."""
    if not published:
        return []
    axis = "version"
    seqs = [int(number or 0) for number in column(published, "seq")]
    sizes = [None if size is None else size / 2**20 for size in column(published, "num_bytes")]
    bases = [n for n, event in enumerate(published) if units.number(event.get("seq")) == 0]
    full = sizes[bases[0]] if bases else None
    deltas = [None if n in bases else size for n, size in enumerate(sizes)]
    curves = [Series("delta", deltas)]
    if full is not None:
        curves.append(Series("full export", [full] * len(published), 1, dashed=True))
    charts = [
        Chart(
            "Size of a delta",
            seqs,
            curves,
            "" if full is None else f"Dashed: the full export it began with, {_mib(full)}.",
            write=_mib,
            from_zero=True,
            axis=axis,
            measure="MiB",
        ),
        Chart(
            "Time to publish",
            seqs,
            [Series("read, compare, write", column(published, "seconds"), 2)],
            write=lambda value: f"{value:.2f} s",
            from_zero=True,
            axis=axis,
            measure="seconds",
        ),
        Chart(
            "Age of new items when first recommended",
            seqs,
            [
                Series("median", [_age(event, 0.5) for event in published], 3),
                Series("oldest", [_age(event, 1.0) for event in published], 3, faint=True),
            ],
            "From an item's first event to the end of the windows that the first version which recommends it has "
            "learnt, in days of the data. Some users of the last window are asked after every publication.",
            write=lambda value: f"{value:.1f} d",
            from_zero=True,
            axis=axis,
            measure="days",
        ),
    ]
    return last_odd_one_wide([chart for chart in charts if any(any(_known(s.values)) for s in chart.series)])


def version_panel(published: Sequence[Event]) -> str:
    """A row a version, the latest ones."""
    if not published:
        return ""
    head = ["version", "step", "windows", "size", "took", "items", "changed", "gone", "first recommended"]
    head += ["their age, median", "oldest"]
    rows = []
    for event in published[-_SHOWN:]:
        cells = [units.whole(event.get(name)) for name in ("seq", "step", "windows")]
        size, seconds = (units.number(event.get(name)) for name in ("num_bytes", "seconds"))
        cells += ["-" if size is None else _mib(size / 2**20)]
        cells += ["-" if seconds is None else f"{seconds:.2f} s"]
        cells += [units.whole(event.get(name)) for name in ("num_items", "changed", "deleted")]
        cells += [f"{len(_ages(event)):,}" if "fresh" in event else "-"]
        cells += [_days(_age(event, 0.5)), _days(_age(event, 1.0))]
        rows.append(page.Row(cells))
    return page.table(head, rows) + f'<p class="note">{_said(published)}</p>'


def _said(published: Sequence[Event]) -> str:
    """What all versions together tell."""
    every = [age for event in published for age in _ages(event)]
    first = max(0, len(published) - _SHOWN)
    told = [f"The latest {_SHOWN} of {len(published):,} versions."] if first else []
    told.append("Changed are items that are new or have another vector; gone are those that lost their rows.")
    if every:
        middle = units.long_duration(statistics.median(every))
        told.append(
            f"{len(every):,} new items have been recommended so far, the first time at a median age of {middle}."
        )
    return " ".join(told)


def _ages(event: Event) -> list[float]:
    fresh = event.get("fresh")
    pairs = fresh if isinstance(fresh, list) else []
    ages = [units.number(pair[1]) for pair in pairs if isinstance(pair, list) and len(pair) == 2]
    return [age for age in ages if age is not None]


def _age(event: Event, share: float) -> float | None:
    """Age in days that so many of the new items are at most; None where there are none."""
    ages = sorted(_ages(event))
    if not ages:
        return None
    return (statistics.median(ages) if share == 0.5 else ages[-1]) / _DAY


def _known(values: Sequence[float | None]) -> list[bool]:
    return [value is not None for value in values]


def _days(age: float | None) -> str:
    return "-" if age is None else units.long_duration(age * _DAY)


def _mib(value: float) -> str:
    return f"{value:,.3f} MiB" if value < 10 else f"{value:,.1f} MiB"
