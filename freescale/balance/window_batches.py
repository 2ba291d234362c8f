"""The global batch of every step of a log that grows: a pure function of seed, step and the windows up to that step.

Window n has passes * ceil(rows / global_batch) steps, and its first step is the sum of those before it. So a window
more changes no batch of an earlier step. Orders are drawn for each window and pass; the last batch of a pass may
be short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from freescale.balance.arrays import IntArray
from freescale.balance.global_batches import GlobalBatches
from freescale.errors import PlanError

_SEED_BITS = 64


class WindowIndex(NamedTuple):
    """What is known of a window without reading its histories.

    Args:
        lengths: [rows] tokens of every row.
        groups: sizes of the runs of rows that are stored together.
        targets: [rows] tokens of every row that have a loss.
    """

    lengths: IntArray
    groups: IntArray
    targets: IntArray


class WindowBatches:
    """Which rows make the global batch of step t; rows count through all windows. Stands where GlobalBatches does.

    Args:
        rows: of every window that is known.
        load: (window) -> what is known of it; asked for windows whose steps are asked for.
        global_batch: samples a step; the last batch of a pass through a window may be smaller.
        seed: a number >= 0.
        passes: how often each window is gone through before the next.
        shuffle_rows: see GlobalBatches.
        window: see GlobalBatches: steps that are dealt anew together, inside one window of the log.
    """

    def __init__(
        self,
        rows: Sequence[int],
        load: Callable[[int], WindowIndex],
        *,
        global_batch: int,
        seed: int = 0,
        passes: int = 1,
        shuffle_rows: int | None = None,
        window: int = 1,
    ) -> None:
        if passes < 1 or global_batch < 1:
            raise PlanError("passes and global_batch are at least 1.", got=f"{passes}, {global_batch}")
        self._load = load
        self._options: dict[str, Any] = {
            "global_batch": global_batch,
            "shuffle_rows": shuffle_rows,
            "window": window,
        }
        self.seed, self.passes, self.global_batch = int(seed), passes, global_batch
        self._first_rows, self._first_steps = [0], [0]
        self._open: dict[int, tuple[GlobalBatches, WindowIndex]] = {}
        self.extend(rows)

    @property
    def num_windows(self) -> int:
        """Windows that are known."""
        return len(self._first_steps) - 1

    @property
    def num_steps(self) -> int:
        """Steps of all of them."""
        return self._first_steps[-1]

    def extend(self, rows: Sequence[int]) -> None:
        """More windows with so many rows each."""
        for count in rows:
            if count < 1:
                raise PlanError("A window has at least one row.", got=count)
            self._first_rows.append(self._first_rows[-1] + count)
            self._first_steps.append(self._first_steps[-1] + self.passes * -(-count // self.global_batch))

    def locate(self, step: int) -> tuple[int, int]:
        """The window of a step and its place there."""
        if not 0 <= step < self.num_steps:
            raise PlanError(
                "The log has no such step.",
                got=step,
                allowed=f"0 to {self.num_steps - 1}, in {self.num_windows} windows",
            )
        window = int(np.searchsorted(self._first_steps, step, side="right")) - 1
        return window, step - self._first_steps[window]

    def first_step(self, window: int) -> int:
        """The step with which a window begins."""
        return self._first_steps[window]

    def steps_in_epoch(self, window: int) -> int:
        """Steps of a window, all passes together."""
        return self._first_steps[window + 1] - self._first_steps[window]

    def batch(self, step: int) -> IntArray:
        """Row numbers, counted through all windows, of the global batch of this step."""
        window, place = self.locate(step)
        rows = self._opened(window)[0].batch(place)
        return rows + self._first_rows[window]

    def some_steps(self, count: int) -> list[int]:
        """So many steps of the last window, which no one has deleted, and its last one, which may be short."""
        first, steps = self.first_step(self.num_windows - 1), self.steps_in_epoch(self.num_windows - 1)
        return sorted({*range(first, first + min(steps, count)), first + steps - 1})

    def lengths_of(self, rows: IntArray) -> IntArray:
        """Tokens of rows of one window."""
        return self._of(rows, "lengths")

    def targets_of(self, rows: IntArray) -> IntArray:
        """Tokens with a loss of rows of one window."""
        return self._of(rows, "targets")

    def recipe(self) -> dict[str, Any]:
        """What decides the batches, besides the windows themselves."""
        return {**self._options, "seed": self.seed, "passes": self.passes}

    def _of(self, rows: IntArray, name: str) -> IntArray:
        if not len(rows):
            return np.zeros(0, np.int64)
        window = int(np.searchsorted(self._first_rows, int(rows[0]), side="right")) - 1
        values: IntArray = getattr(self._opened(window)[1], name)
        return values[rows - self._first_rows[window]]

    def _opened(self, window: int) -> tuple[GlobalBatches, WindowIndex]:
        """This window and one neighbour stay in memory."""
        if window not in self._open:
            index = self._load(window)
            if len(index.lengths) != self._first_rows[window + 1] - self._first_rows[window]:
                raise PlanError(
                    f"Window {window} has another number of rows than the log says.", got=len(index.lengths)
                )
            # A seed of the window's own: those of runs have fewer bits.
            seed = ((window + 1) << _SEED_BITS) | self.seed
            batches = GlobalBatches(index.lengths, seed=seed, groups=index.groups, **self._options)
            while len(self._open) > 1:
                self._open.pop(next(iter(self._open)))
            self._open[window] = batches, index
        return self._open[window]
