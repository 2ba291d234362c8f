"""Runs side by side, on a page and in a terminal: each by its name, with what differs and how sure that is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from freescale import units
from freescale.pages.comparison.compared_runs import ComparedRun, doubts, read_runs
from freescale.pages.comparison.differences import Difference, differences, how_sure, machine_doubts, share
from freescale.pages.comparison.protocols import quality_cards, quality_lines
from freescale.pages.comparison.work_shares import compare_work
from freescale.pages.drawing import page
from freescale.pages.drawing.charts import Chart, Series, draw
from freescale.pages.drawing.smoothing import moving_average
from freescale.pages.drawing.ticks import percent_labels, plain_labels
from freescale.pages.panels.run_header import made_here, origin_text, written
from freescale.pages.panels.time_panels import named_bars
from freescale.pages.report import replace_file
from freescale.trace import CAUSES, WORDS, column, step_of

TONES = (4, 0, 1, 2, 3, 5, 6, 7)
"""Colours of the runs; the baseline is grey."""


def write_comparison(run_dir: str | os.PathLike[str], others: Sequence[str | os.PathLike[str]]) -> Path:
    """Write RUN_DIR/compare.html: the run beside others, of which the first is the baseline.

    Args:
        run_dir: the run whose folder gets the page.
        others: what it is held against; the baseline first.

    Raises:
        FreeScaleError: one of the folders holds no run, or there are too many.
    """
    return replace_file(Path(run_dir) / "compare.html", render_comparison(read_runs([*others, run_dir])))


def comparison_lines(run_dir: str | os.PathLike[str], others: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The outcome in a few lines for a terminal: what to doubt, quality, bubble and step of each run, and how sure."""
    runs = read_runs([*others, run_dir])
    lines = [f"warning: {doubt}" for doubt in doubts(runs) + machine_doubts(runs)]
    told, base = False, (runs[0].name, runs[0].log)
    for place in range(1, len(runs)):
        found = differences(runs, place)
        quality = quality_lines(base, (runs[place].name, runs[place].log))
        if len(runs) > 2 and (found or quality):
            lines.append(f"{runs[place].name} against {runs[0].name}:")
        lines += quality
        if not found:
            continue
        told = True
        bubble, step = found["bubble"], found["step"]
        lines.append(
            f"bubble {units.percent(bubble.before)} -> {units.percent(bubble.after)}: {_outcome(bubble)}"
        )
        times = f"step {units.milliseconds(step.before)} -> {units.milliseconds(step.after)}"
        lines.append(f"{times}: {_outcome(step, less='shorter', more='longer')}")
        work = compare_work(runs[0].work, runs[place].work)
        if work is not None:
            lines.append(
                f"work of the busiest rank over the mean {work.before:.3f} -> {work.after:.3f} (CPU time, which other "
                f"programs do not lengthen): {work.verdict()}"
            )
    return [*lines, how_sure(runs)] if told else lines


def render_comparison(runs: Sequence[ComparedRun]) -> str:
    """The page as text; the first run is the baseline."""
    base, last = runs[0], runs[-1]
    notes = doubts(runs) + machine_doubts(runs)
    title = f"{last.name if len(runs) == 2 else f'{len(runs) - 1} runs'} against {base.name}"
    body = [
        page.cards(_cards(runs)) if len(runs) == 2 else "",
        page.section(f"Against {base.name}", _verdict_table(runs), kind="panel"),
        page.missing(notes, title="What to doubt"),
        page.section("Where the time went", _bars(runs), kind="panel"),
        page.section("By cause", _cause_table(runs), kind="panel"),
        page.section("Over the run", "".join(map(draw, _charts(runs))), kind="charts"),
        page.section("What differs in the recipes", _recipe_table(runs), kind="panel"),
        page.section("The runs", _origins(runs), kind="panel"),
    ]
    header = page.heading(
        brand="FreeScale comparison",
        title=title,
        state="same samples" if not notes else "read the notes",
        finished=not notes,
        lines=[f"Over the steps that all runs have. {how_sure(runs)}", made_here()],
    )
    return page.document(
        title=f"{title} - FreeScale",
        header=header,
        body=body,
        footer="Written by freescale report --compare.",
    )


def _outcome(found: Difference, *, less: str = "less", more: str = "more") -> str:
    interval = found.interval(less=less, more=more)
    verdict = found.verdict(less=less, more=more)
    return f"{verdict} ({interval})" if interval else verdict


def _cards(runs: Sequence[ComparedRun]) -> list[page.Card]:
    base, run = runs
    found = differences(runs, 1)
    cards = []
    if found:
        bubble, step = found["bubble"], found["step"]
        both = f"{base.name} {units.percent(bubble.before)}, {run.name} {units.percent(bubble.after)}"
        cards.append(_verdict_card("Bubble", bubble, both))
        both = f"{base.name} {units.milliseconds(step.before)}, {run.name} {units.milliseconds(step.after)}"
        cards.append(_verdict_card("Step time", step, both, less="shorter", more="longer"))
    work = compare_work(base.work, run.work)
    if work is not None:
        both = f"{base.name} {work.before:.3f}, {run.name} {work.after:.3f}; CPU time, which others do not lengthen"
        cards.append(page.Card("Work of the busiest rank over the mean", work.verdict(), both))
    last = _last_common_step(runs)
    losses = [_losses(one).get(last) for one in runs]
    if losses[0] is not None and losses[1] is not None:
        apart = _farthest_loss(base, run)
        said = "" if apart is None else f"; at most {units.loss(apart)} apart at any step"
        context = f"{base.name} {units.loss(losses[0])}{said}"
        cards.append(page.Card(_loss_name(runs).capitalize(), units.loss(losses[1]), context))
    return cards + quality_cards((base.name, base.log), (run.name, run.log))


def _verdict_card(
    name: str, found: Difference, both: str, *, less: str = "less", more: str = "more"
) -> page.Card:
    interval = found.interval(less=less, more=more)
    context = f"{both}; interval {interval}" if interval else both
    return page.Card(name, found.verdict(less=less, more=more), context)


def _verdict_table(runs: Sequence[ComparedRun]) -> str:
    rows, last = [], _last_common_step(runs)
    shares = _work_cells(runs) if len(runs) > 2 else []  # two runs have a card for it
    for place, run in enumerate(runs):
        if run.account is None:
            continue
        found = differences(runs, place) if place else {}
        changes = ["baseline" if not place else "", ""]
        if found:
            changes = [_outcome(found["bubble"]), _outcome(found["step"], less="shorter", more="longer")]
        better = bool(found) and found["bubble"].is_sure and found["bubble"].after < found["bubble"].before
        loss = _losses(run).get(last)
        cells = [
            run.name,
            units.percent(run.account.bubble),
            changes[0],
            units.milliseconds(run.account.step_ms),
            changes[1],
            "-" if loss is None else units.loss(loss),
            *shares[place : place + 1],
        ]
        rows.append(page.Row(cells, "best" if better else "" if place else "baseline"))
    names = ["run", "bubble", "change of the bubble", "a step", "change of the step", _loss_name(runs)]
    names += ["work of the busiest rank over the mean, CPU time"] if shares else []
    return page.table(names, rows, wraps=True) if len(rows) > 1 else ""


def _work_cells(runs: Sequence[ComparedRun]) -> list[str]:
    """How evenly the ranks of each run shared the work; nothing where no run can be held against the baseline."""
    found = [compare_work(runs[0].work, run.work) for run in runs[1:]]
    before = next((work.before for work in found if work is not None), None)
    if before is None:
        return []
    told = ["-" if work is None else f"{work.after:.3f}: {work.verdict()}" for work in found]
    return [f"{before:.3f}", *told]


def _bars(runs: Sequence[ComparedRun]) -> str:
    rows = [
        (run.name, run.account.shares, units.percent(run.account.bubble))
        for run in runs
        if run.account is not None
    ]
    return named_bars(rows, legend=True)


def _cause_table(runs: Sequence[ComparedRun]) -> str:
    accounts = [run.account for run in runs if run.account is not None]
    if len(accounts) < len(runs):
        return ""
    found = differences(runs, 1) if len(runs) == 2 else {}
    rows = []
    for part in (*CAUSES, "bubble"):
        cells = [
            f"{units.percent(share(one, part))}, {units.milliseconds(share(one, part) * one.step_ms)}"
            for one in accounts
        ]
        change = [_outcome(found[part])] if found else []
        words = WORDS.get(part, "the whole bubble")
        rows.append(page.Row([words, *cells, *change], "total" if part == "bubble" else ""))
    changes = ["change of the share"] if found else []
    return page.table(["share of a step", *(run.name for run in runs), *changes], rows, wraps=True)


def _charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    steps = sorted({step_of(event) or 0 for run in runs for event in run.log.steps})
    many = len(steps) >= 30
    charts = []
    for title, name, write, measure in (
        ("Bubble", "bubble", units.percent, "share of the step"),
        ("Step time", "step_ms", units.milliseconds, "milliseconds"),
        ("Loss", "loss", units.loss, "loss"),
    ):
        series = []
        for tone, run in zip(TONES, runs):
            known = dict(zip((step_of(event) or 0 for event in run.log.steps), column(run.log.steps, name)))
            values = [known.get(step) for step in steps]
            series.append(
                Series(run.name, moving_average(values, span=5 if many and name != "loss" else 1), tone)
            )
        charts.append(
            Chart(
                title,
                steps,
                series,
                "Averages of 5 steps." if many and name != "loss" else "",
                write=write,
                tick=percent_labels if name == "bubble" else plain_labels,
                from_zero=name != "loss",
                wide=name == "loss",
                measure=measure,
            )
        )
    return charts


def _recipe_table(runs: Sequence[ComparedRun]) -> str:
    keys = sorted({key for run in runs for key in run.recipe} - {"run.out"})
    rows = []
    for key in keys:
        cells = [units.fact(run.recipe.get(key)) for run in runs]
        if len(set(cells)) > 1:
            rows.append(page.Row([key, *cells]))
    return page.table(["key", *(run.name for run in runs)], rows) if rows else ""


def _origins(runs: Sequence[ComparedRun]) -> str:
    """When and where each run was started, as far as it says."""
    rows = [page.Row([run.name, written(run.log.start), origin_text(run.log.start)]) for run in runs]
    return (
        page.table(["run", "started", "on"], rows, ends_in_words=True)
        if any(r.cells[1] for r in rows)
        else ""
    )


def _losses(run: ComparedRun) -> dict[int | None, float | None]:
    return dict(zip(map(step_of, run.log.steps), column(run.log.steps, "loss")))


def _last_common_step(runs: Sequence[ComparedRun]) -> int | None:
    """Where losses are held against each other: one run may have been stopped before the others."""
    steps = [{step_of(event) or 0 for event in run.log.steps} for run in runs]
    return max(set.intersection(*steps), default=None)


def _loss_name(runs: Sequence[ComparedRun]) -> str:
    last = _last_common_step(runs)
    ends = {run.log.last_step for run in runs}
    return "final loss" if last is None or ends == {last} else f"loss at step {last:,}"


def _farthest_loss(base: ComparedRun, run: ComparedRun) -> float | None:
    """The largest difference of the loss at a step: the promise is that there is none but rounding."""
    losses = [_losses(one) for one in (base, run)]
    gaps = [
        abs(a - b)
        for step in set(losses[0]) & set(losses[1])
        if (a := losses[0][step]) is not None and (b := losses[1][step]) is not None
    ]
    return max(gaps, default=None)
