"""The parts of a page that show where the time went: the headline bar, a bar a rank, the balance histogram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from freescale import units
from freescale.pages.drawing.ticks import enclosing_ticks, plain_labels
from freescale.trace import PARTS, WORDS, Account, Parts, histogram

MAX_BARS = 64


def headline_panel(account: Account, sentence: str) -> str:
    """The bubble in large figures beside one bar of the whole step, and who is waited for."""
    rows = "".join(
        f'<li><i class="swatch {part}"></i><span>{escape(WORDS[part])}</span>'
        f"<b>{units.percent(account.shares[part])}</b>"
        f"<small>{units.milliseconds(account.shares[part] * account.step_ms)}</small></li>"
        for part in PARTS
    )
    said = f'<p class="note">{escape(sentence)}</p>' if sentence else ""
    return (
        f'<div class="hero"><div class="figure"><strong>{units.percent(account.bubble)}</strong>'
        f"<span>of the time nothing was computed</span><small>{account.num_steps:,} steps of "
        f"{units.milliseconds(account.step_ms)}, mean over ranks</small></div>"
        f'<div class="whole">{bar(account.shares)}<ul class="parts">{rows}</ul>{said}</div></div>'
    )


def bar(shares: Mapping[str, float]) -> str:
    """One step as a bar: every part as long as its share."""
    cells = "".join(
        f'<i class="{part}" style="width:{100 * shares[part]:.3f}%" '
        f'title="{escape(WORDS[part])} {units.percent(shares[part])}"></i>'
        for part in PARTS
        if shares[part] > 0
    )
    spoken = ", ".join(f"{WORDS[part]} {units.percent(shares[part])}" for part in PARTS)
    return f'<div class="bar" role="img" aria-label="{escape(spoken)}">{cells}</div>'


def rank_bars(ranks: Mapping[int, Parts], *, clock_error: object = None) -> str:
    """One bar a rank; of very many ranks those that compute most and least. `clock_error`: seconds between machines."""
    if not ranks:
        return ""
    order = sorted(ranks)
    note = ""
    if len(order) > MAX_BARS:
        ranked = sorted(order, key=lambda rank: ranks[rank].bubble)
        order = sorted(ranked[: MAX_BARS // 2] + ranked[-MAX_BARS // 2 :])
        note = f"The {MAX_BARS // 2} ranks with the least and the {MAX_BARS // 2} with the most bubble of {len(ranks)}."
    apart = units.number(clock_error)
    if apart is not None:
        note += f" Clocks of the machines were compared to within {units.milliseconds(1000 * apart)}."
    rows = [
        (
            f"rank {rank}",
            {part: max(0.0, ranks[rank].share(part)) for part in PARTS},
            units.percent(ranks[rank].bubble),
        )
        for rank in order
    ]
    return named_bars(rows, note=note.strip())


def named_bars(
    rows: Sequence[tuple[str, Mapping[str, float], str]], *, note: str = "", legend: bool = False
) -> str:
    """Bars below each other, each with a name before it and its bubble behind it, over an axis in percent."""
    if not rows:
        return ""
    lines = "".join(
        f'<div class="rank"><span>{escape(name)}</span>{bar(shares)}<b>{escape(bubble)}</b></div>'
        for name, shares, bubble in rows
    )
    keys = "".join(f'<li><i class="swatch {part}"></i>{escape(WORDS[part])}</li>' for part in PARTS)
    top = f'<ul class="legend">{keys}</ul>' if legend else ""
    scale = '<span class="scale"><i>0%</i><i>share of the step</i><i>100%</i></span>'
    head = f'<div class="rank head"><span></span>{scale}<b>bubble</b></div>'
    foot = f'<p class="note">{escape(note)}</p>' if note else ""
    longest = max(len(name) for name, _, _ in rows)
    return f'<div class="bars" style="--label:{longest}ch">{top}{head}{lines}{foot}</div>'


def balance_panel(before: Sequence[float], after: Sequence[float]) -> str:
    """How uneven the steps were planned, and how uneven they would have been with samples dealt out in turn."""
    if not before or not after or max(before) <= 1.0:
        return ""
    # The idle share is what an imbalance costs: 1 - mean / latest.
    idle = [[1 - 1 / max(1.0, value) for value in values] for values in (before, after)]
    edges = _edges(max(max(values) for values in idle))
    counts = [histogram(values, edges) for values in idle]
    ticks = [tick for tick in enclosing_ticks(0, max(max(one) for one in counts)) if float(tick).is_integer()]
    tallest = ticks[-1]
    labels = plain_labels([100 * edge for edge in edges])
    columns = "".join(
        f'<div class="bin" title="{escape(_bin_text(low, high, was, now))}">'
        f'<i class="before" style="height:{100 * was / tallest:.2f}%"></i>'
        f'<i class="after" style="height:{100 * now / tallest:.2f}%"></i>'
        f"<span>{label}</span></div>"
        for low, high, was, now, label in zip(edges, edges[1:], *counts, labels)
    )
    axis = "".join(
        f'<span style="bottom:{100 * tick / tallest:.2f}%">{label}</span>'
        for tick, label in zip(ticks, plain_labels(ticks))
    )
    means = [sum(values) / len(values) for values in idle]
    spoken = (
        f"Planned idle share of {len(before):,} steps: {units.percent(means[0])} with samples dealt out in turn, "
        f"{units.percent(means[1])} as planned"
    )
    return (
        '<figure class="histogram"><figcaption><h3>Planned idle share of the steps</h3>'
        '<ul class="legend">'
        f'<li><i class="swatch before"></i>samples dealt out in turn <b>{units.percent(means[0])}</b></li>'
        f'<li><i class="swatch after"></i>as planned <b>{units.percent(means[1])}</b></li></ul></figcaption>'
        f'<div class="frame"><div class="y-axis" aria-hidden="true"><b>steps</b>{axis}</div>'
        f'<div class="bins" role="img" aria-label="{escape(spoken)}">{columns}</div>'
        '<div class="x-axis" aria-hidden="true"><b>planned idle share of a step, percent</b></div></div>'
        f'<p class="note">Steps by the share of time ranks would idle because another has more work, by predicted '
        f"cost; {len(before):,} steps, means in the legend. A bar begins at the number below it.</p></figure>"
    )


def _edges(highest: float) -> list[float]:
    """At most 12 bins of a round width that hold everything."""
    for width in (0.0025, 0.005, 0.01, 0.02, 0.025, 0.05, 0.1):
        if highest < 12 * width:
            break
    number = int(highest / width) + 1
    return [place * width for place in range(number + 1)]


def _bin_text(low: float, high: float, was: int, now: int) -> str:
    return f"{units.percent(low)} to {units.percent(high)}: {was:,} steps in turn, {now:,} as planned"
