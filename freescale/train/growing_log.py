"""Data that grows under a run: how far the log is known, when to wait for more, and what a checkpoint keeps of it.

Ranks agree on the number of windows before the first step and wherever the known ones are learnt. That decides when a
run waits, never what a step holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freescale.balance import WindowBatches
from freescale.comm.world import Ranks, from_first
from freescale.data import LogSource
from freescale.errors import DataError
from freescale.train.log.events import Progress
from freescale.train.stop_request import StopRequest

_KEPT = ("rows", "events", "targets", "items", "first", "last", "late", "dropped")


@dataclass(kw_only=True)
class GrowingLog:
    """The log a run learns from.

    Args:
        source: the log as far as it is known, the same on all ranks.
        batches: its steps.
        ranks: who takes part.
        follow: whether to wait for more windows at its end.
        num_rows: (window) -> samples it has.
        poll_s: seconds between looks at it.
    """

    source: LogSource
    batches: WindowBatches
    ranks: Ranks
    follow: bool
    num_rows: Callable[[int], int]
    poll_s: float = 0.5

    def window_at(self, step: int) -> int:
        """The window that the step after this many steps lies in; the number of windows where all are learnt."""
        if step >= self.batches.num_steps:
            return self.batches.num_windows
        return self.batches.locate(step)[0]

    def begins_at(self, step: int) -> int | None:
        """The window that begins after this many steps, if one does and is known."""
        window = self.window_at(step)
        known = window < self.batches.num_windows
        return window if known and self.batches.first_step(window) == step else None

    def wait_for_more(self, step: int, *, stop: StopRequest, progress: Progress) -> bool:
        """Wait until there are more windows; False where the run ends here. Every rank must call it.

        Told to stop meanwhile, all ranks stop after this step.
        """
        if not self.follow:
            return False
        known = self.source.num_windows
        progress.notice(
            step, f"all {known:,} windows are learnt; waiting for the next one in {self.source.path}"
        )
        while True:
            if stop.anywhere(self.ranks):
                stop.last_step = step
                return False
            found = from_first(self.source.num_sealed, ranks=self.ranks, what="look for new windows")
            if found > known:
                self.source.use(found)
                self.batches.extend([self.num_rows(n) for n in range(known, found)])
                progress.grown(step, total_steps=self.batches.num_steps)
                return True
            time.sleep(self.poll_s)

    def tell(self, step: int, progress: Progress) -> None:
        """Report a window whose last step this was."""
        window = self.window_at(step - 1)
        if self.batches.first_step(window) + self.batches.steps_in_epoch(window) == step:
            entry = asdict(self.source.entry(window))
            progress.window(step, {"window": window, **{name: entry[name] for name in _KEPT}})

    def clock(self, step: int) -> int:
        """The time of a step (from 0), by the data: the end of its window, in seconds since 1970."""
        return self.source.entry(self.batches.locate(step)[0]).last

    def position(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps: how many windows it has begun to learn, and the fingerprint of all of them."""
        if step == 0:
            return {"windows": 0, "fingerprint": ""}
        window = self.window_at(step - 1)
        return {"windows": window + 1, "fingerprint": self.source.entry(window).fingerprint}

    def check(self, meta: Mapping[str, Any], *, path: Path) -> None:
        """A checkpoint goes on with the windows it has learnt from, whatever came behind them.

        Raises:
            DataError: they are others, or there are fewer.
        """
        said = meta.get("log")
        if said is None:
            raise DataError(
                f"{path} has learnt from a data set, not from a log",
                got=f"data.path={self.source.path}",
                next_step="set data.path to the data it has learnt from, or start a new run",
            )
        windows = int(said["windows"])
        if windows > self.source.num_windows:
            raise DataError(
                f"{path} has learnt {windows} windows, and the log has {self.source.num_windows}",
                got=self.source.path,
                next_step="set data.path to the log it has learnt from",
            )
        if windows and self.source.entry(windows - 1).fingerprint != said["fingerprint"]:
            raise DataError(
                f"{path} has learnt from another log: window {windows - 1} or one before it differs",
                got=self.source.path,
                next_step="set data.path to the log it has learnt from, or start a new run",
            )


@dataclass(frozen=True, kw_only=True)
class WindowTimetable:
    """How long a run over a log is, as far as the log is known, and after which steps it stops to look and to save.

    Args:
        batches: the steps of the log.
        most_steps: length of the run at most; None: the log decides.
        evaluates: whether every window is evaluated before it is learnt.
        checkpoint_every: steps between checkpoints besides those at the ends of windows; None: none.
    """

    batches: WindowBatches
    most_steps: int | None
    evaluates: bool
    checkpoint_every: int | None
    eval_every: int = 0

    @property
    def total_steps(self) -> int:
        """Steps of all windows that are known."""
        known = self.batches.num_steps
        return known if self.most_steps is None else min(known, self.most_steps)

    def due(self, step: int) -> tuple[bool, bool]:
        """Whether an evaluation and a checkpoint are due after a step (from 1)."""
        window = self.batches.locate(step - 1)[0]
        end = self.batches.first_step(window) + self.batches.steps_in_epoch(window) == step
        every = self.checkpoint_every is not None and step % self.checkpoint_every == 0
        return end and self.evaluates, end or every or step == self.total_steps
