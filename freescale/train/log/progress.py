"""A run as a person watches it: start tables, a live line on a terminal, plain lines in a file, closing box.

The events themselves and the sinks that keep them in files come from `events`; all names are importable here.
"""

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rich import box
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freescale import units
from freescale.trace import BASELINES, CAUSES, Event, numeric_fields, step_of
from freescale.train.log.events import Facts, JsonlSink, MetricSink, Progress, TensorBoardSink
from freescale.train.log.task_lines import TASK_SHOWN, task_rows

__all__ = [
    "JsonlSink",
    "MetricSink",
    "Progress",
    "TensorBoardSink",
    "TerminalSink",
    "print_start",
    "print_summary",
]

Field = tuple[str, str, str]
"""What stands before a number, the number, what stands after it."""

EVAL_SHOWN = {"hr@": 2, "ndcg@": 1, "mrr": 1}
"""How many metrics of a kind an eval line shows; all others are in metrics.jsonl, one line must stay readable."""

DROPPED_WHEN_NARROW = ("causes", "captured", "experts", "balance", "epoch", "bubble", "tokens")
MIN_BAR = 10
REFRESH_SECONDS = 0.1
"""Drawing takes about a millisecond; steps of a small model take less than that."""


class TerminalSink:
    """A run as a person watches it: one live line on a terminal, aligned plain lines in a file.

    Args:
        total_steps: where the run ends, for the bar and the remaining time.
        log_every: plain lines are written for the first step seen, every multiple of this, and the last step;
            the live line follows every step.
        stream: where to write, standard output if None.
        console: a rich console to use instead of one on `stream`.
        clock: seconds, for the remaining time.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        log_every: int,
        stream: TextIO | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._log_every = max(1, log_every)
        self._console = console or Console(file=stream or sys.stdout, highlight=False)
        # FORCE_COLOR makes rich call a file a terminal; a live line would fill it with control codes.
        is_terminal = self._console.is_terminal if console else self._console.file.isatty()
        self._live = None
        if is_terminal and not self._console.is_dumb_terminal:
            # No refresh thread: ranks may be forked while the line is up.
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._drawn_at = -math.inf
        self._widths: dict[str, int] = {}
        self._heard: Event = {}
        self._ticked = 0

    def tick(self, event: dict[str, object]) -> None:
        """Move the live line on, with the speed and the bubble last heard of."""
        if self._live is not None:
            self._ticked = step_of(event) or 0
            self._step({**self._heard, **event})

    def write(self, event: dict[str, object]) -> None:
        """Show the event; kinds a person does not need to see are passed over."""
        kind, facts = event.get("event"), event.get("facts")
        if kind == "resume":
            self._print(str(event.get("message")))
        elif kind == "start" and isinstance(facts, Mapping):
            print_start(self._console, facts)
        elif kind == "step":
            heard = ("tokens_per_s", "bubble", "captured", "expert_max", *CAUSES)
            self._heard = {name: event.get(name) for name in heard}
            # A live line that ticks is already further on.
            if (step_of(event) or 0) >= self._ticked:
                self._step(event)
        elif kind == "eval":
            self._print(*_eval_parts(event))
        elif kind == "grown":
            self._total = int(units.number(event.get("total_steps")) or self._total)
        elif kind == "ids":
            self._print(*_id_parts(event))
        elif kind == "experts":
            self._print(_expert_line(event))
        elif kind == "checkpoint":
            self._print(f"saved  step {step_of(event)}  {event.get('path')}")
        elif kind == "notice":
            self._print(f"note   {event.get('text')}")
        elif kind == "pipeline" and event.get("changed"):
            self._print(_pipeline_line(event))
        elif kind == "postpone":
            self._print(_postpone_line(event))
        elif kind == "end":
            self.close()
            print_summary(self._console, event)

    def close(self) -> None:
        """Leave the last state of the live line standing."""
        if self._live is not None:
            self._live.stop()

    def _step(self, event: Event) -> None:
        step, now = step_of(event) or 0, self._clock()
        is_first = self._first is None
        self._first = self._first or (step, now)
        fields = _step_fields(event, step, self._total, self._seconds_left(step, now))
        cells = self._aligned(fields)
        due = is_first or step >= self._total
        if self._live is not None:
            if due or now - self._drawn_at >= REFRESH_SECONDS:
                self._drawn_at = now
                self._live.start()
                self._live.update(self._bar(cells, step), refresh=True)
        elif due or step % self._log_every == 0:
            indent = " " * (5 - len(str(self._total)))
            self._print(f"step {indent}{'  '.join(cells.values())}")

    def _seconds_left(self, step: int, now: float) -> float | None:
        """From the pace since the first step seen, which leaves out the start-up but not the evaluations."""
        first_step, first_time = self._first or (step, now)
        return (now - first_time) / (step - first_step) * (self._total - step) if step > first_step else None

    def _aligned(self, fields: dict[str, Field]) -> dict[str, str]:
        """The fields in columns that only ever grow, so that the lines of a run stay under each other."""
        cells = {}
        for name, (before, value, after) in fields.items():
            self._widths[name] = max(self._widths.get(name, 0), len(value))
            cells[name] = before + value.rjust(self._widths[name]) + after
        return cells

    def _bar(self, cells: dict[str, str], step: int) -> Table:
        """A bar and as many of the fields as fit beside it on one line."""
        for name in DROPPED_WHEN_NARROW:
            if len("  ".join(cells.values())) > self._console.width - MIN_BAR - 1:
                cells.pop(name, None)
        line = "  ".join(cells.values())
        width = min(40, max(MIN_BAR, self._console.width - len(line) - 1))
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(1, self._total), completed=step, width=width)
        grid.add_row(bar, Text(line, no_wrap=True, overflow="crop"))
        return grid

    def _print(self, *parts: str) -> None:
        """A line that stays: whole in a file, broken between its parts where a terminal is too narrow."""
        line = "   ".join(part for part in parts if part)
        if self._live is None:
            self._console.file.write(line + "\n")
            self._console.file.flush()
            return
        fits = len(line) <= self._console.width
        shown = line if fits else "\n      ".join(part for part in parts if part)
        self._console.print(Text(shown), soft_wrap=True)


def print_start(console: Console, facts: Facts) -> None:
    """Print what a run is about to do: one block per section of facts, name beside value."""
    section_width = max((len(section) for section in facts), default=0)
    name_width = max((len(name) for rows in facts.values() for name in rows), default=0)
    room = max(20, console.width - section_width - name_width - 4)
    for section, rows in facts.items():
        label = section
        for name, value in rows.items():
            for line in textwrap.wrap(units.fact(value), room, break_on_hyphens=False) or [""]:
                # Not a rich table: that fills its rows with blanks, which a log file would keep.
                columns = (label.ljust(section_width + 2), "bold"), (name.ljust(name_width + 2), "dim"), line
                console.print(Text.assemble(*columns), soft_wrap=True)
                label = name = ""
        console.print()


def print_summary(console: Console, summary: Mapping[str, object]) -> None:
    """Print the closing box: how long, how fast, how good, and where the results are.

    Args:
        console: where to print.
        summary: any of status, seconds, steps, loss, samples_per_s, tokens_per_s, bubble, best_metric,
            best_value, best_step, popularity and repeat_last (what baselines reach of best_metric), checkpoint,
            report; other names are listed as they are.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _summary_rows(summary).items():
        table.add_row(Text(name), Text(text))
    title = Text(f"Training {summary.get('status', 'finished')}", style="bold")
    console.print(
        Panel(table, title=title, title_align="left", box=box.ROUNDED, expand=False, padding=(0, 1))
    )


def _step_fields(event: Event, step: int, total: int, seconds_left: float | None) -> dict[str, Field]:
    """What a step line says, in its order; what was not measured is left out."""
    fields: dict[str, Field] = {"step": ("", f"{step:>{len(str(total))}}/{total}", "")}
    epoch, rate = units.number(event.get("epoch")), units.number(event.get("tokens_per_s"))
    balance, bubble = units.number(event.get("imbalance")), units.number(event.get("bubble"))
    loss = event.get("loss")
    if epoch is not None:
        fields["epoch"] = ("epoch ", f"{epoch:.0f}" if epoch.is_integer() else f"{epoch:.1f}", "")
    # A NaN loss is shown, not hidden: it is the one thing the reader must see.
    fields["loss"] = ("loss ", units.loss(loss) if isinstance(loss, float | int) else "-", "")
    if rate is not None:
        fields["tokens"] = ("", f"{rate:,.0f}", " tok/s")
    if balance is not None:
        fields["balance"] = ("balance ", f"{balance:.2f}", "")
    load = units.number(event.get("expert_max"))
    if load is not None:
        fields["experts"] = ("experts ", f"{load:.2f}", "")
    if bubble is not None:
        fields["bubble"] = ("bubble ", f"{bubble:.1%}", "")
        shares = {cause: units.number(event.get(cause)) for cause in CAUSES}
        known = [f"{cause} {100 * share:4.1f}" for cause, share in shares.items() if share is not None]
        if known:
            fields["causes"] = ("(", " ".join(known), ")")
    captured = units.number(event.get("captured"))
    if captured is not None:
        fields["captured"] = ("captured ", f"{captured:.0%}", "")
    if seconds_left is not None:
        fields["eta"] = ("eta ", units.duration(seconds_left), "")
    return fields


def _eval_parts(event: Event) -> list[str]:
    """An eval line in two parts: the metrics, and what to hold them against."""
    measured = [name for name in numeric_fields([event]) if not name.startswith(tuple(BASELINES))]
    shown = [
        name
        for kind, most in EVAL_SHOWN.items()
        for name in [n for n in measured if n.startswith(kind)][:most]
    ] or [name for name in measured if "/" not in name or name.startswith(TASK_SHOWN)]
    metrics = "".join(f"  {name} {_metric(event[name])}" for name in shown)
    known = {
        words: event[prefix + shown[0]]
        for prefix, words in BASELINES.items()
        if shown and units.number(event.get(prefix + shown[0])) is not None
    }
    baseline = ", ".join(
        f"{words} {shown[0]} {_metric(value)}" if n == 0 else f"{words} {_metric(value)}"
        for n, (words, value) in enumerate(known.items())
    )
    baseline = f"({baseline})  " if baseline else ""
    label = "test" if event.get("split") == "test" else "eval"
    return [f"{label}  step {step_of(event)}{metrics}", f"{baseline}{event.get('protocol') or ''}".rstrip()]


def _postpone_line(event: Event) -> str:
    took = event.get("ms")
    times = ", ".join(f"{share}: {ms} ms" for share, ms in took.items()) if isinstance(took, Mapping) else ""
    share, kept = units.number(event.get("share")) or 0.0, units.number(event.get("kept_mb")) or 0.0
    return (
        f"weight gradients: {share:.0%} postponed from step {event.get('from_step')} on "
        f"({times}; {kept:,.1f} MiB kept)"
    )


def _pipeline_line(event: Event) -> str:
    way = "prioritized" if event.get("prioritized") else "plain"
    on, off = (units.number(event.get(name)) or 0.0 for name in ("prioritized_ms", "plain_ms"))
    return (
        f"rows   step {step_of(event)}  {way} communication from step {event.get('from_step')} on: "
        f"{on:.1f} ms a step prioritized, {off:.1f} ms plain"
    )


def _id_parts(event: Event) -> list[str]:
    """How full the table is and what happened to ids since the last such line; a warning if there is one."""
    counts = {name: units.number(event.get(name)) or 0 for name in ("asked", "hits", "inserts", "evictions")}
    shared = (units.number(event.get("collisions")) or 0) + (units.number(event.get("not_admitted")) or 0)
    full, hits = units.number(event.get("occupancy")) or 0.0, counts["hits"] / max(1, counts["asked"])
    line = f"ids   step {step_of(event)}  {full:.1%} of {event.get('slots'):,} slots taken  {hits:.1%} hits"
    line += f"  {counts['inserts']:,.0f} new  {counts['evictions']:,.0f} evicted  {shared:,.0f} shared a row"
    warning = event.get("warning")
    return [line, f"warning: {warning}"] if warning else [line]


def _expert_line(event: Event) -> str:
    """How evenly the experts were used since the last such line."""
    fullest, even, dead = (
        units.number(event.get(f"expert_{name}")) or 0.0 for name in ("max", "entropy", "dead")
    )
    return (
        f"experts step {step_of(event)}  fullest {fullest:.2f} times the mean  entropy {even:.4f}  "
        f"{dead:.0f} without a token"
    )


def _metric(value: object) -> str:
    number = units.number(value)
    return "-" if number is None else units.metric(number)


def _summary_rows(summary: Mapping[str, object]) -> dict[str, str]:
    numbers = {name: number for name, value in summary.items() if (number := units.number(value)) is not None}
    rows: dict[str, str] = {}
    if "seconds" in numbers:
        rows["time"] = units.long_duration(numbers["seconds"])
    if "steps" in numbers:
        rows["steps"] = f"{numbers['steps']:,.0f}"
    rates = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}
    speeds = [f"{numbers[name]:,.0f} {unit}" for name, unit in rates.items() if name in numbers]
    if speeds:
        rows["speed"] = "   ".join(speeds)
    if "bubble" in numbers:
        rows["bubble"] = units.percent(numbers["bubble"])
    if "loss" in numbers:
        rows["loss"] = units.loss(numbers["loss"])
    rows |= _quality_rows(summary, numbers)
    used = {"event", "time", "step", "status", "seconds", "steps", *rates, "bubble", "loss", "best_metric"}
    used |= {"best_value", "best_step", "popularity", "repeat_last"}
    tested = task_rows("test", summary.get("test"))
    if tested is not None:
        rows |= tested
        used |= {"test"}
    return rows | {
        name: units.fact(value) for name, value in summary.items() if name not in used and value is not None
    }


def _quality_rows(summary: Mapping[str, object], numbers: Mapping[str, float]) -> dict[str, str]:
    """The best metric and, beside it, what no training at all would have reached."""
    if "best_value" not in numbers:
        return {}
    metric = str(summary.get("best_metric") or "metric")
    step = f" at step {numbers['best_step']:,.0f}" if "best_step" in numbers else ""
    best = f"{metric} {units.metric(numbers['best_value'])}{step}"
    for name, words in (("popularity", "popularity"), ("repeat_last", "repeat last")):
        times = units.factor(numbers["best_value"], numbers.get(name))
        best += f", {times} {words} ({units.metric(numbers[name])})" if times else ""
    return {"best": best}
