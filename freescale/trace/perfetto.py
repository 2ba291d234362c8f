"""The spans of a run as a Chrome trace: open trace.json in ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from freescale.trace.bubbles import missing_of
from freescale.trace.replacement import whole_file
from freescale.trace.span_file import RankSpans, RunSpans, common_steps
from freescale.trace.spans import MAIN, Span

MAX_EVENTS = 400_000
"""About 60 MB, which the viewer still opens; of longer runs the last steps are written."""


def write_trace(path: Path, spans: RunSpans) -> Path:
    """Write everything the span files hold: a process a rank, a thread a lane, a counter track of steps."""
    with whole_file(path) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in _events(spans):
            file.write(separator + json.dumps(event, separators=(",", ":"), allow_nan=False))
            separator = ",\n"
        file.write("\n]}\n")
    return path


def _events(spans: RunSpans) -> Iterator[dict[str, object]]:
    ranks = spans.ranks
    steps = common_steps(ranks) or sorted({step for one in ranks for step in one.steps})
    size = sum(len(step.spans) + 1 for one in ranks for step in one.steps.values())
    if size > MAX_EVENTS:
        steps = steps[-max(1, len(steps) * MAX_EVENTS // size) :]
    for one in ranks:
        yield from _rank_events(one, set(steps))


def _rank_events(one: RankSpans, steps: set[int]) -> Iterator[dict[str, object]]:
    lanes = {MAIN: 0}
    yield {"ph": "M", "name": "process_name", "pid": one.rank, "args": {"name": f"rank {one.rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": one.rank, "args": {"sort_index": one.rank}}
    for step in one.steps.values():
        if step.step not in steps:
            continue
        parts = {
            name: round(1000 * getattr(step.parts, name), 4)
            for name in ("compute", "straggler", "comm", "host")
        }
        yield _slice(f"step {step.step}", "step", one.rank, 1000, step.start, step.end, {"ms": parts})
        for span in step.spans:
            if span.lane not in lanes:
                lanes[span.lane] = len(lanes)
            yield _slice(
                span.name, span.kind, one.rank, lanes[span.lane], span.start, span.end, _arguments(span)
            )
    for lane, number in (*lanes.items(), ("steps", 1000)):
        yield {"ph": "M", "name": "thread_name", "pid": one.rank, "tid": number, "args": {"name": lane}}


def _slice(
    name: str, kind: str, rank: int, lane: int, start: float, end: float, arguments: dict[str, object]
) -> dict[str, object]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": rank,
        "tid": lane,
        "ts": round(1e6 * start, 3),
        "dur": round(1e6 * (end - start), 3),
        "args": arguments,
    }


def _arguments(span: Span) -> dict[str, object]:
    arguments: dict[str, object] = {"step": span.step}
    if span.arrival is not None:
        arguments["arrived_us"] = round(1e6 * span.arrival.mark, 3)
    if span.last is not None:
        arguments["last_rank_arrived_us"] = round(1e6 * span.last, 3)
        arguments["waited_for_a_rank_us"] = round(1e6 * sum(high - low for low, high in missing_of(span)), 3)
    return arguments
