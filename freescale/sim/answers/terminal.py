"""Answers and profiles for a terminal; the page and the files say more."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from freescale.sim.answers.answer import PREDICTION, Answer, Sweep
from freescale.sim.answers.page import COLUMNS, cells
from freescale.sim.answers.whatif import Prediction, short_names
from freescale.sim.inputs.profile import Profile

_NAME_WIDTH = 16


def answer_lines(answer: Answer) -> Iterator[str]:
    """Tables, what moves the answer most, and what not to trust."""
    setting = answer.setting
    words = setting.workload.words(rank=setting.rank_word)
    yield f"{PREDICTION} {setting.cluster.name}, {words}; compute from {setting.profile.hardware}"
    for count in answer.gpus:
        rows = [one for one in answer.ladder if one.gpus == count]
        yield from _table(setting.ranks_in_words(count), short_names([one.features for one in rows]), rows)
        yield from _reduction_line(answer, count)
    if any(one.features.balancer == "kk_equal" for one in answer.ladder):
        yield "KK-equal: Karmarkar-Karp with equal counts of samples a rank, as other systems balance."
    if answer.sweep is not None:
        yield from _sweep_table(answer.sweep, ranks=setting.ranks_in_words(answer.gpus[-1]))
    for one in answer.influences[:5]:
        yield (
            f"{one.key} {one.low:g} to {one.high:g}: time lost {one.low_lost:.1%} to {one.high_lost:.1%} ({one.source})"
        )
    yield from answer.notes
    yield "What each part rests on: --page FILE or --json."


def _table(title: str, names: list[str], rows: list[Prediction]) -> Iterator[str]:
    width = max(_NAME_WIDTH, len(title) + 1, *(len(name) + 1 for name in names))
    yield ""
    yield f"{title:<{width}}" + "".join(f"{name:>11}" for name in COLUMNS[1:-2]) + "  $/10⁹  limit"
    for name, one in zip(names, rows):
        _, *values, limit, dollars = cells(one, name)
        yield f"{name:<{width}}" + "".join(f"{value:>11}" for value in values) + f"{dollars:>7}  {limit}"


def _reduction_line(answer: Answer, count: int) -> Iterator[str]:
    """What all ideas take away; one rank waits for nobody and has nothing to take away."""
    was, now = answer.baseline(count).bubble, answer.best(count).bubble
    if count == 1 or was <= 0:
        return
    change = answer.bubble_reduction(count)
    yield (
        f"{answer.setting.ranks_in_words(count)}: bubble {was:.1%} -> {now:.1%}, "
        f"{abs(change):.1%} {'less' if change >= 0 else 'more'}"
    )


def _sweep_table(sweep: Sweep, *, ranks: str) -> Iterator[str]:
    """A row a value, everything else as asked, on the largest number of ranks."""
    yield from _table(sweep.key, sweep.values, sweep.predictions)
    yield f"Sweep of {sweep.key} on {ranks}, everything else as asked."


def profile_table(profile: Profile) -> Table:
    """Every part of a step that was measured, as a line and its error."""
    table = Table(
        "part",
        "fixed ms",
        "us a token or row",
        "ns a square",
        "held-out error",
        title=escape(profile.hardware),
    )
    for name, timing in profile.times.items():
        error = "" if timing.error is None else f"{timing.error:.1%}"
        table.add_row(
            name,
            f"{timing.fixed_ms:.3f}",
            f"{1e3 * timing.per_token_ms:.3f}",
            f"{1e6 * timing.per_square_ms:.3f}",
            error,
        )
    return table
