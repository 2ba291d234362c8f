"""Two runs side by side: what changed between their recipes, and what that did to bubbles, speed and loss."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from freescale import units
from freescale.pages import page
from freescale.pages.charts import Chart, Series, draw
from freescale.pages.protocols import protocol_doubts, quality_cards, quality_lines
from freescale.pages.report import replace_file, require_run
from freescale.pages.smoothing import moving_average
from freescale.pages.time_panels import bar
from freescale.trace import (
    CAUSES,
    PARTS,
    WORDS,
    Account,
    Event,
    MetricsLog,
    account_of,
    column,
    read_metrics,
    step_of,
)


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs."""

    name: str
    log: MetricsLog
    recipe: Mapping[str, object]
    account: Account | None


def write_comparison(run_dir: str | os.PathLike[str], before_dir: str | os.PathLike[str]) -> Path:
    """Write RUN_DIR/compare.html: the run beside an earlier one that it is held against.

    Args:
        run_dir: the run, "after".
        before_dir: what it is held against, "before".

    Raises:
        FreeScaleError: one of the folders holds no run.
    """
    after, before = read_run(Path(run_dir)), read_run(Path(before_dir))
    return replace_file(Path(run_dir) / "compare.html", render_comparison(before, after))


def comparison_lines(run_dir: str | os.PathLike[str], before_dir: str | os.PathLike[str]) -> list[str]:
    """The outcome in a few lines for a terminal: what to doubt, the bubble, the time of a step."""
    before, after = _on_common_steps(read_run(Path(before_dir)), read_run(Path(run_dir)))
    lines = [f"warning: {doubt}" for doubt in doubts(before, after)]
    lines += quality_lines(before.log, after.log)
    was, now = before.account, after.account
    if was is None or now is None:
        return lines
    cut = reduction(was.bubble, now.bubble)
    change = "" if cut is None else f", {units.percent(abs(cut))} {'less' if cut >= 0 else 'more'}"
    lines.append(f"bubble {units.percent(was.bubble)} -> {units.percent(now.bubble)}{change}")
    lines.append(f"step {units.milliseconds(was.step_ms)} -> {units.milliseconds(now.step_ms)}")
    return lines


def read_run(folder: Path) -> ComparedRun:
    """What a comparison needs of a run."""
    require_run(folder)
    log = read_metrics(folder / "metrics.jsonl")
    return ComparedRun(folder.resolve().name, log, _recipe(folder), account_of(log.steps))


def reduction(before: float, after: float) -> float | None:
    """1 - after / before; None where there was nothing to reduce."""
    return 1 - after / before if before > 0 else None


def render_comparison(before: ComparedRun, after: ComparedRun) -> str:
    """The page as text."""
    if before.name == after.name:
        before, after = (
            replace(before, name=f"{before.name} (before)"),
            replace(after, name=f"{after.name} (after)"),
        )
    before, after = _on_common_steps(before, after)
    notes = doubts(before, after)
    body = [
        page.missing(notes),
        page.cards(_cards(before, after)),
        page.section("Where the time went", _bars(before, after), kind="panel"),
        page.section("By cause", _cause_table(before, after), kind="panel"),
        page.section("Over the run", "".join(map(draw, _charts(before, after))), kind="charts"),
        page.section("What differs in the recipes", _recipe_table(before, after), kind="panel"),
    ]
    header = page.heading(
        brand="FreeScale comparison",
        title=f"{after.name} against {before.name}",
        state="same samples" if not notes else "read the notes",
        finished=not notes,
        lines=["Reduction is 1 - bubble after / bubble before, over the steps both runs have."],
    )
    return page.document(
        title=f"{after.name} against {before.name} - FreeScale",
        header=header,
        body=body,
        footer="Written by freescale report --compare.",
    )


def doubts(before: ComparedRun, after: ComparedRun) -> list[str]:
    """What keeps two runs from being comparable, in plain words."""
    said = [
        f"{run.name} has no breakdown of its time in metrics.jsonl."
        for run in (before, after)
        if run.account is None
    ]
    said += protocol_doubts(before.log, after.log)
    tokens = [_tokens(run.log) for run in (before, after)]
    common = sorted(set(tokens[0]) & set(tokens[1]))
    if not common:
        return [*said, "The runs have no step in common."]
    other = [step for step in common if tokens[0][step] != tokens[1][step]]
    if other:
        said.append(
            f"The runs did not compute the same samples: {len(other):,} of {len(common):,} common steps have another "
            f"number of tokens, first step {other[0]:,}."
        )
    ranks = [_num_ranks(run) for run in (before, after)]
    if ranks[0] != ranks[1]:
        said.append(f"The runs have different numbers of ranks: {ranks[0]} before, {ranks[1]} after.")
    return said


def _cards(before: ComparedRun, after: ComparedRun) -> list[page.Card]:
    cards = []
    was, now = before.account, after.account
    if was is not None and now is not None:
        cut = reduction(was.bubble, now.bubble)
        context = f"{units.percent(was.bubble)} before, {units.percent(now.bubble)} after"
        cards.append(page.Card("Bubble reduction", "-" if cut is None else units.percent(cut), context))
        times = units.factor(was.step_ms, now.step_ms)
        both = f"{units.milliseconds(was.step_ms)} before, {units.milliseconds(now.step_ms)} after"
        cards.append(page.Card("Steps are faster by", times or "-", both))
    losses = [_last(run.log, "loss") for run in (before, after)]
    if losses[0] is not None and losses[1] is not None:
        gap = f"{units.loss(losses[0])} before"
        cards.append(page.Card("Final loss", units.loss(losses[1]), gap))
    return cards + quality_cards(before.log, after.log)


def _bars(before: ComparedRun, after: ComparedRun) -> str:
    rows = "".join(
        f'<div class="rank"><span>{label}</span>{bar(run.account.shares)}'
        f"<b>{units.percent(run.account.bubble)}</b></div>"
        for label, run in (("before", before), ("after", after))
        if run.account is not None
    )
    keys = "".join(f'<li><i class="swatch {part}"></i>{WORDS[part]}</li>' for part in PARTS)
    head = '<div class="rank head"><span></span><span></span><b>bubble</b></div>'
    return f'<div class="bars"><ul class="legend">{keys}</ul>{head}{rows}</div>' if rows else ""


def _cause_table(before: ComparedRun, after: ComparedRun) -> str:
    was, now = before.account, after.account
    if was is None or now is None:
        return ""
    rows = []
    for part in (*CAUSES, "bubble"):
        low, high = (_share(account, part) for account in (now, was))
        cut = reduction(high, low)
        rows.append(
            page.Row(
                [
                    WORDS.get(part, "the whole bubble"),
                    units.percent(high),
                    units.percent(low),
                    units.milliseconds(high * was.step_ms),
                    units.milliseconds(low * now.step_ms),
                    "-" if cut is None else units.percent(cut),
                ],
                "best" if part == "bubble" else "",
            )
        )
    names = ["", "before", "after", "a step before", "a step after", "reduction of the share"]
    return page.table(names, rows)


def _charts(before: ComparedRun, after: ComparedRun) -> list[Chart]:
    charts = [
        ("Bubble", "bubble", units.percent, True),
        ("Step time", "step_ms", units.milliseconds, True),
        ("Loss", "loss", units.loss, False),
    ]
    steps = sorted({step_of(event) or 0 for run in (before, after) for event in run.log.steps})
    drawn = []
    for title, name, write, from_zero in charts:
        series = []
        for tone, (label, run) in enumerate((("before", before), ("after", after))):
            known = dict(zip((step_of(event) or 0 for event in run.log.steps), column(run.log.steps, name)))
            values = [known.get(step) for step in steps]
            span = 5 if len(steps) >= 30 and name != "loss" else 1
            series.append(Series(label, moving_average(values, span=span), (4, 0)[tone]))
        note = "Averages of 5 steps." if len(steps) >= 30 and name != "loss" else ""
        wide = name == "loss"
        tick = units.percent if name == "bubble" else units.compact
        drawn.append(Chart(title, steps, series, note, write, tick, from_zero=from_zero, wide=wide))
    return drawn


def _recipe_table(before: ComparedRun, after: ComparedRun) -> str:
    keys = sorted({*before.recipe, *after.recipe} - {"run.out"})
    rows = [
        page.Row([key, units.fact(before.recipe.get(key)), units.fact(after.recipe.get(key))])
        for key in keys
        if before.recipe.get(key) != after.recipe.get(key)
    ]
    return page.table(["key", "before", "after"], rows) if rows else ""


def _recipe(folder: Path) -> dict[str, object]:
    try:
        values = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    sections = values.items() if isinstance(values, dict) else ()
    return {
        f"{section}.{key}": value
        for section, keys in sections
        if isinstance(keys, dict)
        for key, value in keys.items()
    }


def _tokens(log: MetricsLog) -> dict[int, int]:
    """Tokens of every step, from what the log says of speed and time."""
    rows = zip(log.steps, column(log.steps, "tokens_per_s"), column(log.steps, "step_ms"))
    return {
        step_of(event) or 0: round(rate * ms / 1000)
        for event, rate, ms in rows
        if rate is not None and ms is not None
    }


def _num_ranks(run: ComparedRun) -> int | None:
    totals: Event = run.log.ranks or {}
    values = totals.get("total")
    return len(values) if isinstance(values, list) else None


def _share(account: Account, part: str) -> float:
    return account.bubble if part == "bubble" else account.shares[part]


def _last(log: MetricsLog, name: str) -> float | None:
    return next((value for value in reversed(column(log.steps, name)) if value is not None), None)


def _on_common_steps(before: ComparedRun, after: ComparedRun) -> tuple[ComparedRun, ComparedRun]:
    """A longer run must not be judged by steps the other one never took."""
    steps = [{step_of(event) for event in run.log.steps} for run in (before, after)]
    common = steps[0] & steps[1]
    first, second = (
        replace(run, account=account_of([event for event in run.log.steps if step_of(event) in common]))
        for run in (before, after)
    )
    return first, second
