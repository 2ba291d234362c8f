"""A run as a person watches it: start tables, a live line on a terminal, plain lines in a file, closing box.

The events themselves and the sinks that keep them in files are in `events`, the words of each line in `terminal_lines`.
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
from freescale.trace import CAUSES, IDS_OF, Event, step_of
from freescale.train.log.events import Facts
from freescale.train.log.terminal_lines import (
    Field,
    eval_parts,
    expert_line,
    id_parts,
    pipeline_line,
    postpone_line,
    step_fields,
    summary_rows,
)

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
            self._print(*eval_parts(event))
        elif kind == "grown":
            self._total = int(units.number(event.get("total_steps")) or self._total)
        elif kind == "ids":
            self._print(*id_parts(event))
        elif str(kind).startswith(IDS_OF):
            self._print(*id_parts(event, table=str(kind).removeprefix(IDS_OF)))
        elif kind == "experts":
            self._print(expert_line(event))
        elif kind == "checkpoint":
            self._print(f"saved  step {step_of(event)}  {event.get('path')}")
        elif kind == "notice":
            self._print(f"note   {event.get('text')}")
        elif kind == "pipeline" and event.get("changed"):
            self._print(pipeline_line(event))
        elif kind == "postpone":
            self._print(postpone_line(event))
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
        fields = step_fields(event, step, self._total, self._seconds_left(step, now))
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
    for name, text in summary_rows(summary).items():
        table.add_row(Text(name), Text(text))
    title = Text(f"Training {summary.get('status', 'finished')}", style="bold")
    console.print(
        Panel(table, title=title, title_align="left", box=box.ROUNDED, expand=False, padding=(0, 1))
    )
