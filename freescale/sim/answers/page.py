"""The answer as one offline HTML page, in the style of a run's report; first of all it says that it is a prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from freescale import pages, units
from freescale.pages import Chart, Series, draw, draw_timeline, named_bars, percent_labels
from freescale.sim.answers.answer import PREDICTION, Answer, Sweep
from freescale.sim.answers.confidence import EXTRAPOLATED
from freescale.sim.answers.keys import value_of
from freescale.sim.answers.whatif import Prediction, short_names
from freescale.sim.inputs.cluster import numbers
from freescale.trace import CAUSES, RunSpans

COLUMNS = (
    "features",
    "step",
    "tokens/s",
    "efficiency",
    "bubble",
    "straggler",
    "comm",
    "host",
    "SM loss",
    "limit",
    "$ / 10⁹ tokens",
)


def render_page(answer: Answer, *, spans: RunSpans | None = None, made: str = "", command: str = "") -> str:
    """The page as text.

    Args:
        answer: what is shown.
        spans: a timeline, where one is wanted.
        made: when, where and by which version it was simulated, in words.
        command: what was typed.
    """
    setting, largest = answer.setting, answer.gpus[-1]
    timeline = draw_timeline(spans.ranks) if spans is not None else ""
    reasons: dict[str, list[str]] = {}
    for mark in answer.marks:
        if mark.state == EXTRAPOLATED:
            reasons.setdefault(mark.why, []).append(mark.part)
    extrapolated = [f"{', '.join(parts)}: {why}" for why, parts in reasons.items()]
    body = [
        pages.cards(_cards(answer, largest)),
        _notes(answer),
        pages.missing(extrapolated, title=f"{PREDICTION} Extrapolated:"),
        pages.section(f"A step on {setting.ranks_in_words(largest)}", _bars(answer, largest), kind="panel"),
        pages.section(f"By number of {setting.rank_word}s", _scaling_charts(answer), kind="charts"),
        *(
            pages.section(
                setting.ranks_in_words(count),
                _table([p for p in answer.ladder if p.gpus == count]),
                kind="panel",
            )
            for count in answer.gpus
        ),
        pages.section("Everything but one", _table(answer.ablation) if answer.ablation else "", kind="panel"),
        pages.section(
            f"Sweep of {answer.sweep.key}" if answer.sweep else "", _sweep(answer.sweep), kind="charts"
        ),
        pages.section("Which assumption moves it most", _influences(answer), kind="panel"),
        pages.section("Timeline, simulated", timeline, kind="panel"),
        pages.section("What is measured and what is not", _marks(answer), kind="panel"),
        pages.section("Cluster", _cluster(answer), kind="panel"),
    ]
    title = f"{largest:,} x {setting.cluster.name}"
    header = pages.heading(
        brand="FreeScale simulation",
        title=title,
        state="prediction",
        finished=False,
        lines=[
            PREDICTION,
            setting.workload.words(rank=setting.rank_word),
            f"Compute from: {setting.profile.hardware}",
            made,
        ],
        command=command,
    )
    return pages.document(
        title=f"{title} - FreeScale simulation",
        header=header,
        body=body,
        footer=f"Written by freescale simulate. {PREDICTION}",
        scripts=("report.js", "timeline.js") if timeline else ("report.js",),
    )


def cells(one: Prediction, name: str) -> list[str]:
    """One row of the table, as in the terminal."""
    return [
        name,
        units.milliseconds(one.step_ms),
        units.compact(one.tokens_per_s),
        f"{one.efficiency:.0%}",
        *(units.percent(value) for value in (one.bubble, one.straggler, one.comm, one.host, one.contention)),
        one.limit,
        f"{one.cost_per_billion:,.2f}",
    ]


def _notes(answer: Answer) -> str:
    """What a reader should not have to find out; what is extrapolated has a box of its own."""
    notes = [note for note in answer.notes if not note.startswith(EXTRAPOLATED.capitalize())]
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _cards(answer: Answer, gpus: int) -> list[pages.Card]:
    best, off = answer.best(gpus), answer.baseline(gpus)
    faster = units.factor(best.tokens_per_s, off.tokens_per_s) or "-"
    above = "; why above 100 %: below" if best.efficiency > 1 else ""
    return [
        pages.Card(
            "Step", units.milliseconds(best.step_ms), f"{units.milliseconds(off.step_ms)} with all off"
        ),
        pages.Card("Tokens per second", units.compact(best.tokens_per_s), f"{faster} all off"),
        pages.Card(
            "Scaling efficiency", f"{best.efficiency:.0%}", f"{off.efficiency:.0%} with all off{above}"
        ),
        pages.Card("Bubble", units.percent(best.bubble), f"{units.percent(off.bubble)} with all off"),
        pages.Card(
            "Bubble reduction", units.percent(answer.bubble_reduction(gpus)), f"limit now: {best.limit}"
        ),
        pages.Card(
            "10⁹ tokens", f"${best.cost_per_billion:,.2f}", f"${off.cost_per_billion:,.2f} with all off"
        ),
    ]


def _bars(answer: Answer, gpus: int) -> str:
    chosen = [one for one in answer.ladder if one.gpus == gpus]
    rows = [
        (
            name,
            {"compute": 1 - one.bubble, **{cause: getattr(one, cause) for cause in CAUSES}},
            units.percent(one.bubble),
        )
        for name, one in zip(short_names([one.features for one in chosen]), chosen)
    ]
    return named_bars(rows, legend=True)


def _table(rows: Sequence[Prediction]) -> str:
    best = min(rows, key=lambda one: one.cost_per_billion)
    named = zip(short_names([one.features for one in rows]), rows)
    return pages.table(
        COLUMNS,
        [
            pages.Row(cells(one, name), "best" if one is best else "baseline" if name == "all off" else "")
            for name, one in named
        ],
    )


def _scaling_charts(answer: Answer) -> str:
    if len(answer.gpus) < 2:
        return ""
    last = {answer.best(count).features.words() for count in answer.gpus}
    # What can be on may differ by the number of GPUs.
    best = last.pop() if len(last) == 1 else "everything"
    shown = {
        answer.ladder[0].features.words(): [answer.baseline(count) for count in answer.gpus],
        "balance": [one for one in answer.ladder if one.features.words() == "balance"],
        best: [answer.best(count) for count in answer.gpus],
    }

    def series(value: Callable[[Prediction], float]) -> list[Series]:
        drawn = {name: rows for name, rows in shown.items() if len(rows) == len(answer.gpus)}
        return [
            Series(name, [value(one) for one in rows], tone=tone)
            for tone, (name, rows) in enumerate(drawn.items())
        ]

    word = answer.setting.rank_word
    charts = (
        Chart(
            f"Tokens per second of a {word}",
            answer.gpus,
            series(lambda one: one.tokens_per_s / one.gpus),
            f"A level line is perfect scaling: twice the {word}s, twice the tokens.",
            from_zero=True,
            write=units.compact,
            axis=f"{word}s",
            measure=f"tokens per second and {word}",
            log=True,
        ),
        Chart(
            "Bubble",
            answer.gpus,
            series(lambda one: one.bubble),
            from_zero=True,
            write=units.percent,
            tick=percent_labels,
            axis=f"{word}s",
            measure="share of the step",
            log=True,
        ),
    )
    return "".join(map(draw, charts))


def _sweep(sweep: Sweep | None) -> str:
    if sweep is None:
        return ""
    table = f'<div class="panel chart wide">{_sweep_table(sweep)}</div>'
    try:
        places = [float(value) for value in sweep.values]
    except ValueError:
        return table
    if len(set(places)) < 2 or not all(map(math.isfinite, places)):
        return table
    order = sorted(range(len(places)), key=lambda place: places[place])
    rows = [sweep.predictions[place] for place in order]
    where = [places[place] for place in order]
    charts = (
        Chart(
            "Step time",
            where,
            [Series("all features", [one.step_ms for one in rows])],
            from_zero=True,
            write=units.milliseconds,
            axis=sweep.key,
            measure="milliseconds",
        ),
        Chart(
            "Bubble",
            where,
            [Series("all features", [one.bubble for one in rows], tone=1)],
            from_zero=True,
            write=units.percent,
            tick=percent_labels,
            axis=sweep.key,
            measure="share of the step",
        ),
    )
    return "".join(map(draw, charts)) + table


def _sweep_table(sweep: Sweep) -> str:
    rows = [pages.Row([value, *cells(one, value)[1:]]) for value, one in zip(sweep.values, sweep.predictions)]
    return pages.table([sweep.key, *COLUMNS[1:]], rows)


def _influences(answer: Answer) -> str:
    rows = [
        pages.Row(
            [
                one.key,
                f"{units.compact(float(value_of(answer.setting, answer.features, one.key)))}",
                f"{units.compact(one.low)} to {units.compact(one.high)}",
                f"{units.percent(one.low_lost)} to {units.percent(one.high_lost)}",
                f"{one.low_tokens:.2f}x to {one.high_tokens:.2f}x",
                one.source,
            ]
        )
        for one in answer.influences
    ]
    return (
        pages.table(
            ["assumption", "value", "tried", "time lost", "tokens/s", "source"], rows, ends_in_words=True
        )
        if rows
        else ""
    )


def _marks(answer: Answer) -> str:
    rows = [pages.Row([one.part, one.state, one.why]) for one in answer.marks]
    return pages.table(["part", "trust", "how"], rows, ends_in_words=True)


def _cluster(answer: Answer) -> str:
    cluster = answer.setting.cluster
    rows = [
        pages.Row([name, units.count(float(getattr(cluster, name))), cluster.sources.get(name, "")])
        for name in numbers()
    ]
    return pages.table(["number", "value", "source"], rows, ends_in_words=True)
