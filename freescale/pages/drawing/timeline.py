"""The steps of a run over its ranks, as one picture to zoom into: what each rank did when, and whom it waited for.

Python chooses what is shown and splits every wait at the last arrival; timeline.js only draws, on a canvas, because
thousands of rectangles would make an SVG slow. Everything shown is a copy of the span files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from freescale.trace import (
    BLOCK,
    MAIN,
    KeptStep,
    RankSpans,
    Span,
    common_steps,
    missing_of,
    overlap,
    union,
    without,
)

MAX_WINDOWS = 8
MAX_RANKS = 32
KINDS = ("compute", "straggler", "comm", "host", "stage")
"""Places of the colours in timeline.js."""

_SHORTEST_S = 2e-6
"""Shorter than what a picture shows at the deepest zoom, and most of the waits that were none."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of the picture."""

    lane: int
    kind: str
    name: str
    step: int
    start: float
    end: float


@dataclass(frozen=True)
class Lane:
    """A row of the picture: a rank's main thread, or another thread of it."""

    rank: int
    thread: str

    @property
    def label(self) -> str:
        """What stands beside the row."""
        return f"rank {self.rank}" if self.thread == MAIN else self.thread


def draw_timeline(ranks: Sequence[RankSpans]) -> str:
    """The picture as HTML, or an empty text where no steps are kept."""
    shown = choose_ranks(ranks)
    windows = choose_windows(common_steps(shown))
    if not windows:
        return ""
    data = {
        "kinds": KINDS,
        "windows": [window_data(shown, steps) for steps in windows],
    }
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    options = "".join(
        f'<option value="{place}">{escape(_steps_text(steps))}</option>'
        for place, steps in enumerate(windows)
    )
    buttons = "".join(
        f'<button type="button" data-do="{what}" aria-label="{label}" title="{label}">{sign}</button>'
        for what, sign, label in (
            ("in", "+", "Zoom in"),
            ("out", "&minus;", "Zoom out"),
            ("left", "&larr;", "Earlier"),
            ("right", "&rarr;", "Later"),
            ("fit", "Fit", "Fit: show everything"),
        )
    )
    keys = "".join(
        f'<li><i class="swatch {kind}"></i>{words}</li>'
        for kind, words in (
            ("compute", "compute"),
            ("straggler", "waiting for the last rank"),
            ("comm", "exposed communication"),
            ("host", "host and the rest"),
        )
    )
    left_out = f" Shown are {len(shown)} of {len(ranks)} ranks." if len(shown) < len(ranks) else ""
    return (
        '<figure class="timeline"><figcaption>'
        f'<label>Steps <select aria-label="Steps shown">{options}</select></label>'
        f'<span class="buttons">{buttons}</span><ul class="legend">{keys}</ul></figcaption>'
        '<div class="lanes"><div class="labels"></div>'
        '<div class="view" tabindex="0" role="img" aria-label="Timeline of steps over ranks; arrow keys move, '
        'plus and minus zoom"><canvas></canvas><div class="tip" hidden></div></div></div>'
        '<p class="note">Time from left to right, from the start of the first step shown; a row a rank. '
        "Drag to move; pinch, or scroll with Ctrl held, to zoom; point at a piece to read it. "
        f"Thin rows are other threads.{escape(left_out)}</p>"
        f'<script type="application/json">{packed}</script></figure>'
    )


def choose_ranks(ranks: Sequence[RankSpans]) -> list[RankSpans]:
    """All ranks, or as many as can be told apart, spread evenly over them."""
    if len(ranks) <= MAX_RANKS:
        return list(ranks)
    return [ranks[place * (len(ranks) - 1) // (MAX_RANKS - 1)] for place in range(MAX_RANKS)]


def choose_windows(steps: Sequence[int]) -> list[list[int]]:
    """Up to MAX_WINDOWS blocks of successive steps, from all over the run; the last one comes first."""
    blocks: dict[int, list[int]] = {}
    for step in steps:
        blocks.setdefault((step - 1) // BLOCK, []).append(step)
    whole = list(blocks.values())
    if len(whole) > MAX_WINDOWS:
        whole = [whole[place * (len(whole) - 1) // (MAX_WINDOWS - 1)] for place in range(MAX_WINDOWS)]
    return whole[::-1]


def window_data(ranks: Sequence[RankSpans], steps: Sequence[int]) -> dict[str, object]:
    """What timeline.js draws of some steps: rows, names, step borders and rectangles in microseconds."""
    kept = [[one.steps[step] for step in steps] for one in ranks]
    zero = min(step.start for row in kept for step in row)
    lanes = [lane for one, row in zip(ranks, kept) for lane in _lanes(one.rank, row)]
    pieces = [
        piece for one, row in zip(ranks, kept) for step in row for piece in cut_step(step, one.rank, lanes)
    ]
    names = sorted({piece.name for piece in pieces})
    places = {name: place for place, name in enumerate(names)}
    return {
        "lanes": [[lane.label, int(lane.thread != MAIN)] for lane in lanes],
        "names": names,
        "borders": [[step.step, _us(step.end - zero)] for step in kept[0]],
        "end": _us(max(step.end for row in kept for step in row) - zero),
        "pieces": [
            [
                piece.lane,
                KINDS.index(piece.kind),
                places[piece.name],
                piece.step,
                _us(piece.start - zero),
                _us(piece.end - piece.start),
            ]
            for piece in pieces
        ],
    }


def cut_step(step: KeptStep, rank: int, lanes: Sequence[Lane]) -> list[Piece]:
    """The spans of a step as pieces of one colour each; what no span of the main thread covers is host time."""
    pieces: list[Piece] = []
    for place, lane in enumerate(lanes):
        if lane.rank != rank:
            continue
        mine = [span for span in step.spans if span.lane == lane.thread]
        solid = [piece for span in mine for piece in _pieces(span, place, step)]
        if lane.thread == MAIN:
            covered = union((piece.start, piece.end) for piece in solid)
            solid += [
                Piece(place, "host", _around(mine, low, high), step.step, low, high)
                for low, high in without([(step.start, step.end)], covered)
                if high - low > _SHORTEST_S
            ]
        pieces += solid
    return pieces


def _pieces(span: Span, lane: int, step: KeptStep) -> list[Piece]:
    low, high = max(span.start, step.start), min(span.end, step.end)
    if high - low < _SHORTEST_S:
        return []
    if span.kind == "compute":
        return [Piece(lane, "compute", span.name, step.step, low, high)]
    if span.kind == "stage":
        # Stages of the main thread only name the gaps between its work and its waits.
        return [] if span.lane == MAIN else [Piece(lane, "stage", span.name, step.step, low, high)]
    whole = [(low, high)]
    late = overlap(whole, missing_of(span))
    causes = {"straggler": late, "comm": without(whole, late)}
    return [Piece(lane, cause, span.name, step.step, *each) for cause in causes for each in causes[cause]]


def _around(spans: Sequence[Span], low: float, high: float) -> str:
    """The innermost stage that holds most of a gap."""
    inside = [
        s for s in spans if s.kind == "stage" and min(s.end, high) - max(s.start, low) > (high - low) / 2
    ]
    return min(inside, key=lambda s: s.end - s.start).name if inside else "between stages"


def _lanes(rank: int, steps: Sequence[KeptStep]) -> list[Lane]:
    threads = {span.lane for step in steps for span in step.spans} - {MAIN}
    return [Lane(rank, MAIN), *(Lane(rank, thread) for thread in sorted(threads))]


def _steps_text(steps: Sequence[int]) -> str:
    return f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)
