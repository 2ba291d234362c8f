"""Line and stacked-area charts as HTML fragments: inline SVG for the shapes, HTML for every word.

The SVG is stretched to the width of its box while all text stays HTML at its own size, so one fragment is
as readable on a phone as on a wide screen. What the pointer shows is precomputed here; the page's script
only moves it into place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from freescale import units
from freescale.pages.drawing.smoothing import Values
from freescale.pages.drawing.ticks import enclosing_ticks, plain_labels, spread_ticks, step_ticks

MAX_POINTS = 400
"""A chart is at most some 500 pixels wide twice over; more points than this only make the file larger."""

DOTS_UP_TO = 40
"""Curves with few points show them as dots, so that one evaluation is visible at all."""


@dataclass(frozen=True)
class Series:
    """One curve, or a dashed baseline of one value; `tone` picks its colour, so that the two can share it."""

    name: str
    values: Values
    tone: int = 0
    dashed: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Band:
    """A stretch of steps in which something was otherwise, shaded behind the curves; the note says what."""

    first: float
    last: float


@dataclass(frozen=True)
class Chart:
    """Several curves over the same steps, or over what `axis` names.

    Args:
        title: what the chart shows.
        steps: where the values lie from left to right.
        series: the curves.
        note: a sentence or two below it.
        write: a value in words, for legend and pointer.
        tick: labels of the vertical axis, all of them together.
        from_zero: whether the vertical axis begins at zero.
        stacked: whether the curves lie one on top of the other.
        wide: whether it takes the whole row.
        axis: name of the horizontal axis.
        measure: name of the vertical axis; the title without one.
        at_least: a range that is always shown, so that a flat curve looks flat.
        log: whether the horizontal axis is logarithmic, with the values themselves as ticks.
        bands: stretches to shade.
    """

    title: str
    steps: Sequence[float]
    series: Sequence[Series]
    note: str = ""
    write: Callable[[float], str] = units.count
    tick: Callable[[Sequence[float]], list[str]] = plain_labels
    from_zero: bool = False
    stacked: bool = False
    wide: bool = False
    axis: str = "step"
    measure: str = ""
    at_least: tuple[float, float] | None = None
    log: bool = False
    bands: Sequence[Band] = ()


@dataclass(frozen=True)
class _Frame:
    """The part of the number plane a chart shows."""

    left: float
    right: float
    bottom: float
    top: float
    ticks: list[float] = field(default_factory=list)
    log: bool = False

    def x(self, step: float) -> float:
        """Way from the left edge, 0 to 1."""
        if not self.right > self.left:
            return 0.5
        if self.log:
            return math.log(step / self.left) / math.log(self.right / self.left)
        return (step - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        """Height above the bottom, 0 to 1; values off the scale stop at its edge."""
        return min(1.0, max(0.0, (value - self.bottom) / (self.top - self.bottom)))


def draw(chart: Chart) -> str:
    """The chart as a `<figure>`, or an empty text if it has nothing to show."""
    if not any(value is not None for series in chart.series for value in series.values):
        return ""
    chart = _thinned(chart)
    heights = _stacked(chart.series) if chart.stacked else [series.values for series in chart.series]
    frame = _frame(chart, heights)
    shapes = _bands(chart, frame) + _grid(frame) + "".join(_shapes(chart, heights, frame))
    hover = escape(json.dumps(_hover(chart, heights, frame), separators=(",", ":"), allow_nan=False))
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}" data-chart="{hover}">'
        f"<figcaption><h3>{escape(chart.title)}</h3>{_legend(chart)}</figcaption>"
        f'<div class="frame">{_y_axis(chart, frame)}'
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(_spoken(chart))}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>'
        f'<div class="cursor" hidden></div><div class="tip" hidden></div></div>{_x_axis(chart, frame)}</div>'
        f"{_note(chart, heights, frame)}</figure>"
    )


def _thinned(chart: Chart) -> Chart:
    """At most MAX_POINTS steps: of each stretch the lowest and highest point, so that spikes survive."""
    total = len(chart.steps)
    if total <= MAX_POINTS:
        return chart
    guide = chart.series[0].values
    keep = {0, total - 1}
    num_stretches = MAX_POINTS // 2
    for stretch in range(num_stretches):
        rows = range(stretch * total // num_stretches, (stretch + 1) * total // num_stretches)
        known = [(value, row) for row in rows if (value := guide[row]) is not None]
        keep.update((min(known)[1], max(known)[1]) if known else rows[:1])
    order = sorted(keep)
    series = [replace(one, values=[one.values[row] for row in order]) for one in chart.series]
    return replace(chart, steps=[chart.steps[row] for row in order], series=series)


def _stacked(series: Sequence[Series]) -> list[Values]:
    totals = [0.0] * len(series[0].values)
    layers: list[Values] = []
    for one in series:
        totals = [total + (value or 0.0) for total, value in zip(totals, one.values)]
        layers.append(totals)
    return layers


def _frame(chart: Chart, heights: Sequence[Values]) -> _Frame:
    values = sorted(value for layer in heights for value in layer if value is not None)
    low, high = (min(0.0, values[0]) if chart.from_zero or chart.stacked else values[0]), values[-1]
    # A first step that compiles kernels takes a hundred times the others and would flatten them all.
    usual = values[int(0.95 * (len(values) - 1))]
    if chart.from_zero and len(values) >= 10 and high > 3 * usual > 0:
        high = 1.3 * usual
    if chart.at_least is not None:
        low, high = min(low, chart.at_least[0]), max(high, chart.at_least[1])
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        low, high = (0.0, 2 * high) if high > 0 else (low - max(1.0, abs(low)), high + max(1.0, abs(high)))
    ticks = enclosing_ticks(low, high)
    first, last = min(chart.steps), max(chart.steps)
    if chart.log and first > 0:
        return _Frame(first, last, ticks[0], ticks[-1], ticks, log=True)
    # Curves that begin early begin at zero: the axis then ends on round numbers.
    left = 0 if first <= 0.25 * last else first
    return _Frame(left, last, ticks[0], ticks[-1], ticks)


def _bands(chart: Chart, frame: _Frame) -> str:
    """Shaded stretches, half a step wider than their steps, so that one step is seen, too."""
    areas = []
    for band in chart.bands:
        left, right = (
            1000 * min(1.0, max(0.0, frame.x(step))) for step in (band.first - 0.5, band.last + 0.5)
        )
        areas.append(f"M{left:.1f} 0H{right:.1f}V1000H{left:.1f}Z")
    return f'<path class="band" d="{"".join(areas)}"/>' if areas else ""


def _grid(frame: _Frame) -> str:
    rows = (f"M0 {_down(frame, tick):.1f}H1000" for tick in frame.ticks)
    return f'<path class="grid" d="{"".join(rows)}"/>'


def _down(frame: _Frame, value: float) -> float:
    return 1000 * (1 - frame.y(value))


def _shapes(chart: Chart, heights: Sequence[Values], frame: _Frame) -> list[str]:
    shapes = []
    floor: Values = [0.0] * len(chart.steps)
    for series, layer in zip(chart.series, heights):
        points = _points(chart.steps, layer, frame)
        tone = f"tone{series.tone}"
        if chart.stacked:
            back = [point for point in reversed(_points(chart.steps, floor, frame)) if point]
            outline = "L".join(f"{x:.1f} {y:.1f}" for x, y in [p for p in points if p] + back)
            shapes.append(f'<path class="area {tone}" d="M{outline}Z"/>')
            floor = layer
        style = " dashed" if series.dashed else " faint" if series.faint else ""
        line = _level(points) if series.dashed else _line(points)
        shapes.append(f'<path class="line {tone}{style}" d="{line}"/>')
        if len(chart.steps) <= DOTS_UP_TO and not (series.dashed or series.faint):
            # A stroke of no length with round ends stays a circle however the picture is stretched.
            dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in filter(None, points))
            shapes.append(f'<path class="dots {tone}" d="{dots}"/>')
    return shapes


def _points(steps: Sequence[float], values: Values, frame: _Frame) -> list[tuple[float, float] | None]:
    return [
        None if value is None else (1000 * frame.x(step), _down(frame, value))
        for step, value in zip(steps, values)
    ]


def _line(points: Sequence[tuple[float, float] | None]) -> str:
    """An SVG path that lifts the pen over missing values."""
    parts, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        parts.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
        pen = "L"
    return "".join(parts)


def _level(points: Sequence[tuple[float, float] | None]) -> str:
    """A baseline from edge to edge, so that it is seen even beside a single evaluation."""
    return next((f"M0 {point[1]:.1f}H1000" for point in points if point), "")


def _hover(chart: Chart, heights: Sequence[Values], frame: _Frame) -> dict[str, object]:
    """For every step: its place on the axis, and for every curve its height and its value in words."""
    rows = [
        {
            "name": series.name,
            "tone": series.tone,
            "dashed": series.dashed,
            "y": [None if value is None else round(frame.y(value), 4) for value in layer],
            "text": ["-" if value is None else chart.write(value) for value in series.values],
        }
        for series, layer in zip(chart.series, heights)
    ]
    return {
        "x": [round(frame.x(step), 4) for step in chart.steps],
        "at": [f"{chart.axis} {step:,}" for step in chart.steps],
        "rows": rows,
    }


def _legend(chart: Chart) -> str:
    """Every curve's colour, name and last value: the figures most readers came for."""
    items = []
    for series in chart.series:
        last = next((value for value in reversed(series.values) if value is not None), None)
        # Dashed lines are baselines; the note explains them once instead of once per metric.
        if last is None or series.dashed:
            continue
        style = " faint" if series.faint else ""
        items.append(
            f'<li><i class="key tone{series.tone}{style}"></i>{escape(series.name)} '
            f"<b>{escape(chart.write(last))}</b></li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _y_axis(chart: Chart, frame: _Frame) -> str:
    labels = (
        f'<span style="bottom:{100 * frame.y(tick):.2f}%">{escape(label)}</span>'
        for tick, label in zip(frame.ticks, chart.tick(frame.ticks))
    )
    name = escape(chart.measure or chart.title)
    return f'<div class="y-axis" aria-hidden="true"><b>{name}</b>{"".join(labels)}</div>'


def _x_axis(chart: Chart, frame: _Frame) -> str:
    if frame.log or chart.axis != "step":
        ticks = spread_ticks(chart.steps, [frame.x(step) for step in chart.steps])
    else:
        ticks = step_ticks(frame.left, frame.right)
    labels = (
        f'<span style="left:{100 * frame.x(tick):.2f}%">{escape(_short(tick))}</span>' for tick in ticks
    )
    scale = ", logarithmic" if frame.log else ""
    return f'<div class="x-axis" aria-hidden="true">{"".join(labels)}<b>{escape(chart.axis)}{scale}</b></div>'


def _short(value: float) -> str:
    """`1,024`, `98.3k`: four digits are as short without a suffix."""
    return units.count(value) if abs(value) < 1e4 else units.compact(value)


def _note(chart: Chart, heights: Sequence[Values], frame: _Frame) -> str:
    notes = [chart.note] if chart.note else []
    high, step = max(
        (value, -step) for layer in heights for step, value in zip(chart.steps, layer) if value is not None
    )
    if high > frame.top:
        notes.append(
            f"The highest point, {chart.write(high)} at {chart.axis} {-step:,}, lies above the scale."
        )
    return f'<p class="note">{escape(" ".join(notes))}</p>' if notes else ""


def _spoken(chart: Chart) -> str:
    """The chart in a sentence, for those who hear the page."""
    curves = []
    for series in chart.series:
        known = [value for value in series.values if value is not None]
        if known:
            curves.append(f"{series.name} from {chart.write(known[0])} to {chart.write(known[-1])}")
    over = f"{chart.axis.removesuffix('s')}s {min(chart.steps):,} to {max(chart.steps):,}"
    return f"{chart.title}, {over}: {'; '.join(curves)}"
