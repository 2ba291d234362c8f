"""The account of a profiled program, ours or not: the same four parts, from the kernels themselves.

What is compute here is what a GPU was seen to compute, so gaps between kernels are bubbles too. Copies, fills and
collectives that no compute covers are comm; the kernel of a collective is straggler time until the last rank has
started its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from freescale import units
from freescale.errors import DataError
from freescale.pages.drawing import page
from freescale.pages.drawing.timeline import draw_timeline
from freescale.pages.panels.run_header import made_here
from freescale.pages.panels.time_panels import headline_panel, rank_bars
from freescale.pages.report import replace_file
from freescale.trace import (
    CAUSES,
    MAIN,
    Account,
    Arrival,
    Interval,
    KeptStep,
    Parts,
    ProfilerTrace,
    RankSpans,
    Span,
    clock_offsets,
    collective_keys,
    lateness,
    read_profiler_traces,
    split_step,
    total,
    union,
)

_SHOWN_GAP = 1 / 2000
"""Gaps between kernels shorter than this share of a step are not drawn; they are counted all the same."""


@dataclass(frozen=True)
class Busy:
    """What common tools say of a rank: any kernel is busy, also one that only waits. Seconds."""

    window: float
    busy: float
    compute: float

    @property
    def idle(self) -> float:
        """No kernel at all."""
        return self.window - self.busy


@dataclass(frozen=True)
class TraceAccount:
    """Everything a set of traces tells."""

    ranks: dict[int, list[KeptStep]]
    busy: dict[int, Busy]
    problems: list[str]

    def parts(self) -> dict[int, Parts]:
        """Rank -> where its time went."""
        return {rank: total(step.parts for step in steps) for rank, steps in self.ranks.items()}

    def account(self) -> Account:
        """All ranks together."""
        everybody = total(self.parts().values())
        num_steps = max(len(steps) for steps in self.ranks.values())
        shares = {name: everybody.share(name) for name in ("compute", *CAUSES)}
        return Account(num_steps, 1000 * everybody.total / len(self.ranks) / num_steps, shares)


def account_traces(traces: Sequence[ProfilerTrace]) -> TraceAccount:
    """Split every profiled step of every rank; without profiler steps, the time in which any rank was seen."""
    problems = [problem for trace in traces for problem in trace.problems]
    sizes = [trace.world_size for trace in traces if trace.world_size]
    if sizes and max(sizes) > len(traces):
        problems.append(
            f"There are traces of {len(traces)} of {max(sizes)} ranks: the others may be who is waited for, so some "
            "of what is counted as comm may be straggler time."
        )
    offsets = clock_offsets(traces)
    for rank, offset in offsets.items():
        if offset:
            problems.append(
                f"The clock of rank {rank} was moved by {1000 * offset:+,.2f} ms: collectives end together."
            )
    latest = _latest_starts(traces, offsets)
    windows = _windows(traces, offsets)
    ranks = {
        trace.rank: _split(trace, offsets[trace.rank], windows[trace.rank], latest)
        for trace in traces
        if windows[trace.rank]
    }
    if not ranks:
        raise DataError("the traces have no step in common", next_step="profile the same steps on every rank")
    return TraceAccount(ranks, {trace.rank: busy_idle(trace) for trace in traces}, problems)


def busy_idle(trace: ProfilerTrace) -> Busy:
    """Busy and idle between a rank's first and last kernel, as Holistic Trace Analysis defines them."""
    everything = union((one.start, one.end) for one in trace.activities)
    compute = union((one.start, one.end) for one in trace.activities if one.kind == "compute")
    window = everything[-1][1] - everything[0][0] if everything else 0.0
    return Busy(window, _length(everything), _length(compute))


def write_trace_report(paths: Sequence[Path], target: Path) -> TraceAccount:
    """Read traces, write the page, and return what it says."""
    if not paths:
        raise DataError("no trace file was given", next_step="freescale report --trace rank0.json rank1.json")
    account = account_traces(read_profiler_traces(paths))
    replace_file(target, render_trace_report(account, names=[path.name for path in paths]))
    return account


def render_trace_report(account: TraceAccount, *, names: Sequence[str]) -> str:
    """The page as text."""
    parts = account.parts()
    spans = [
        RankSpans(rank, {}, {step.step: _drawable(step) for step in steps})
        for rank, steps in account.ranks.items()
    ]
    timeline = draw_timeline(spans)
    body = [
        page.missing(account.problems),
        page.section("Where the time went", headline_panel(account.account(), lateness(parts)), kind="panel"),
        page.section("Timeline", timeline, kind="panel"),
        page.section("Rank by rank", rank_bars(parts), kind="panel"),
        page.section("Beside the usual busy time", _busy_table(parts, account.busy), kind="panel"),
    ]
    header = page.heading(
        brand="FreeScale trace report",
        title=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        state=f"{len(parts)} ranks" if len(parts) > 1 else "1 rank",
        finished=True,
        lines=[
            "From traces of the torch profiler. Waiting inside a collective counts as bubble.",
            made_here(),
        ],
    )
    return page.document(
        title=f"{names[0]} - FreeScale",
        header=header,
        body=body,
        footer="Written by freescale report --trace.",
        scripts=("report.js", "timeline.js") if timeline else ("report.js",),
    )


def _busy_table(parts: Mapping[int, Parts], busy: Mapping[int, Busy]) -> str:
    rows = [
        page.Row(
            [
                f"rank {rank}",
                units.percent(busy[rank].busy / busy[rank].window),
                units.percent(busy[rank].idle / busy[rank].window),
                units.percent(parts[rank].share("compute")),
                units.percent(parts[rank].bubble),
            ]
        )
        for rank in parts
        if busy[rank].window > 0
    ]
    return page.table(["rank", "any kernel", "no kernel", "compute", "bubble"], rows)


def _latest_starts(
    traces: Sequence[ProfilerTrace], offsets: Mapping[int, float]
) -> dict[tuple[int, str, int], float]:
    """When the last rank began each collective that several ranks have; on the common clock."""
    starts: dict[tuple[int, str, int], list[float]] = {}
    for trace in traces:
        for key, one in collective_keys(trace):
            starts.setdefault(key, []).append(one.start + offsets[trace.rank])
    return {key: max(values) for key, values in starts.items() if len(values) > 1}


def _windows(
    traces: Sequence[ProfilerTrace], offsets: Mapping[int, float]
) -> dict[int, list[tuple[int, float, float]]]:
    """(step, start, end) of each rank's steps, on the common clock."""
    if all(trace.steps for trace in traces):
        common = set.intersection(*({number for number, _ in trace.steps} for trace in traces))
        return {
            trace.rank: [
                (number, start + offsets[trace.rank], end + offsets[trace.rank])
                for (number, start), end in zip(trace.steps, [*(s for _, s in trace.steps[1:]), trace.end])
                if number in common
            ]
            for trace in traces
        }
    # One window for all: a rank that starts late is waited for, and that must be seen.
    first = min(trace.activities[0].start + offsets[trace.rank] for trace in traces)
    last = max(one.end + offsets[trace.rank] for trace in traces for one in trace.activities)
    return {trace.rank: [(1, first, last)] for trace in traces}


def _split(
    trace: ProfilerTrace,
    offset: float,
    windows: Sequence[tuple[int, float, float]],
    latest: Mapping[tuple[int, str, int], float],
) -> list[KeptStep]:
    spans = [
        _span(one.kind, one.name, one.start + offset, one.end + offset)
        for one in trace.activities
        if one.kind != "collective"
    ]
    for key, one in collective_keys(trace):
        spans.append(_span("collective", one.name, one.start + offset, one.end + offset, latest.get(key)))
    return [
        KeptStep(
            number,
            start,
            end,
            split_step(start, end, spans),
            [s for s in spans if s.end > start and s.start < end],
        )
        for number, start, end in windows
        if end > start
    ]


def _span(kind: str, name: str, start: float, end: float, last: float | None = None) -> Span:
    if kind == "compute":
        return Span(name, "compute", MAIN, 0, start, end)
    return Span(name, "wait", MAIN, 0, start, end, Arrival(name, 0, start, 0), last)


def _drawable(step: KeptStep) -> KeptStep:
    """The same step with kernels that follow each other closely drawn as one."""
    gap = _SHOWN_GAP * step.parts.total
    merged: list[Interval] = []
    for low, high in union((span.start, span.end) for span in step.spans if span.kind == "compute"):
        if merged and low - merged[-1][1] < gap:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    kernels = [Span("kernels", "compute", MAIN, step.step, low, high) for low, high in merged]
    waits = [span for span in step.spans if span.kind == "wait" and span.end - span.start >= gap]
    return KeptStep(step.step, step.start, step.end, step.parts, kernels + waits)


def _length(intervals: Sequence[Interval]) -> float:
    return sum(high - low for low, high in intervals)
