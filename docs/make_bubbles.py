"""Draws docs/images/bubbles.svg: the same steps of two real runs, shared out at random and balanced, from their traces.

    freescale train recipes/long_tail.yaml --nproc 2 run.out=runs/off balance.enabled=false
    freescale train recipes/long_tail.yaml --nproc 2 run.out=runs/on
    python docs/make_bubbles.py runs/off runs/on

Work is what the first thread of a rank computed in that time; whatever is left of a step is idle.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "images" / "bubbles.svg"
LEFT, WIDTH, TOP, ROWS, LEGEND = 62, 900, 54, 150, 34
WORK, EDGE, IDLE, INK, SOFT = "#2a7f9e", "#f7f9fa", "#e9b9a6", "#1f2d33", "#5b6b73"


@dataclass(frozen=True)
class Stretch:
    """Some steps of one run: microseconds of every rank, counted from the beginning of the first of them.

    Args:
        starts: when each step begins, on the rank that begins it first; the end of the last behind it.
        work: rank -> what it computed, as (from, to).
        idle: share of these steps in which nothing was computed, over all ranks.
    """

    starts: list[float]
    work: list[list[tuple[float, float]]]
    idle: float

    @property
    def length(self) -> float:
        """From the beginning of the first step to the end of the last."""
        return self.starts[-1]


def stretch(run: Path, steps: range) -> Stretch:
    """These steps of a run, from its `trace.json`."""
    events = json.loads((run / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    marks = [span for span in spans if span["cat"] == "step" and _step(span) in steps]
    num_ranks = 1 + max(span["pid"] for span in marks)
    zero = min(span["ts"] for span in marks)
    starts = [min(span["ts"] for span in marks if _step(span) == step) - zero for step in steps]
    starts.append(max(span["ts"] + span["dur"] for span in marks) - zero)
    computed = [
        span
        for span in spans
        if span["cat"] == "compute" and span["tid"] == 0 and span["args"]["step"] in steps
    ]
    work = [
        [(span["ts"] - zero, span["ts"] + span["dur"] - zero) for span in computed if span["pid"] == rank]
        for rank in range(num_ranks)
    ]
    times = [span["args"]["ms"] for span in marks]
    return Stretch(
        starts, work, 1 - sum(time["compute"] for time in times) / sum(sum(t.values()) for t in times)
    )


def _step(span: dict[str, Any]) -> int:
    return int(span["name"].removeprefix("step "))


def panel(drawn: Stretch, *, top: float, scale: float, title: str) -> list[str]:
    """One bar a rank, and a line where a step begins."""
    num_ranks = len(drawn.work)
    pitch = ROWS / 2 / num_ranks
    bar = pitch - min(4.0, pitch / 4)
    parts = [
        f'<text x="{LEFT}" y="{top - 10:.1f}" font-size="14" font-weight="600" fill="{INK}">{title}</text>',
        f'<text x="{WIDTH - 20}" y="{top - 10:.1f}" font-size="13" text-anchor="end" fill="{INK}">'
        f"{drawn.length / 1e6:.1f} s, {100 * drawn.idle:.0f} % idle</text>",
    ]
    for rank, work in enumerate(drawn.work):
        y = top + rank * pitch
        parts += [
            f'<text x="14" y="{y + bar / 2 + 4:.1f}" font-size="11" fill="{SOFT}">rank {rank}</text>',
            f'<rect x="{LEFT}" y="{y:.1f}" width="{drawn.length * scale:.1f}" height="{bar:.1f}" fill="{IDLE}"/>',
        ]
        parts += [
            f'<rect x="{LEFT + begin * scale:.1f}" y="{y:.1f}" width="{(end - begin) * scale:.2f}" '
            f'height="{bar:.1f}" fill="{WORK}"/>'
            for begin, end in work
        ]
    parts += [
        f'<path d="M{LEFT + start * scale:.1f} {top - 3:.1f}v{ROWS / 2 + 2:.1f}" stroke="{INK}" stroke-width="0.8"/>'
        for start in drawn.starts
    ]
    return parts


def draw(before: Stretch, after: Stretch, steps: range) -> str:
    """The whole picture as SVG."""
    scale = (WIDTH - LEFT - 20) / max(before.length, after.length)
    height = TOP + ROWS + 56 + LEGEND
    second = TOP + ROWS / 2 + 42
    y = height - 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">',
        f"<title>{len(steps)} steps of one training, measured, shared out at random and balanced</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{EDGE}"/>',
        *panel(before, top=TOP, scale=scale, title=f"Shared out at random: steps {steps[0]} to {steps[-1]}"),
        *panel(after, top=second, scale=scale, title="Balanced by FreeScale: the same steps"),
        f'<rect x="{LEFT}" y="{y - 10}" width="12" height="12" fill="{WORK}"/>',
        f'<text x="{LEFT + 18}" y="{y}" font-size="12" fill="{INK}">compute</text>',
        f'<rect x="{LEFT + 90}" y="{y - 10}" width="12" height="12" fill="{IDLE}"/>',
        f'<text x="{LEFT + 108}" y="{y}" font-size="12" fill="{INK}">'
        "idle: the other rank is not done, or rows travel</text>",
        f'<text x="{WIDTH - 20}" y="{y}" font-size="12" text-anchor="end" fill="{SOFT}">'
        f"measured on {os.cpu_count()} cores; a line where a step begins</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="folder of the run without balance")
    parser.add_argument("after", type=Path, help="folder of the run with balance")
    parser.add_argument("--first", type=int, default=21, help="first step to draw, default 21")
    parser.add_argument("--steps", type=int, default=12, help="how many, default 12")
    options = parser.parse_args()
    steps = range(options.first, options.first + options.steps)
    drawn = draw(stretch(options.before, steps), stretch(options.after, steps), steps)
    OUT.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
