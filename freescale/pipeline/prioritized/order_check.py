"""Proves, while a run goes on, that no stage reads or writes a row before the row's last update.

The owner of a row notes which batches use it and whether their updates are done. A stage that reads rows for batch n
must find every update of an earlier batch done; an update must come once, in the order of the batches. The notes cost
a few sorted searches a stage, so this is for tests and for `pipeline.check=true`.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from freescale.errors import TrainingError


class RowOrder(Protocol):
    """Hears of everything that happens to the rows of this rank."""

    def uses(self, step: int, table: str, rows: Tensor) -> None:
        """A batch will update these unique local rows."""

    def read(self, step: int, table: str, rows: Tensor, *, stage: str) -> None:
        """A stage reads rows for a batch."""

    def updated(self, step: int, table: str, rows: Tensor, *, stage: str) -> None:
        """A stage has updated unique rows of a batch."""


class NoCheck:
    """Trusts the schedule."""

    def uses(self, step: int, table: str, rows: Tensor) -> None:
        """Nothing to note."""

    def read(self, step: int, table: str, rows: Tensor, *, stage: str) -> None:
        """Nothing to check."""

    def updated(self, step: int, table: str, rows: Tensor, *, stage: str) -> None:
        """Nothing to check."""


class OrderCheck:
    """Notes the rows that still wait for an update, by table and batch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, int], Tensor] = {}

    def uses(self, step: int, table: str, rows: Tensor) -> None:
        """A batch will update these unique local rows."""
        with self._lock:
            self._waiting[table, step] = rows.cpu()

    def read(self, step: int, table: str, rows: Tensor, *, stage: str) -> None:
        """Refuse a read that comes before the update of an earlier batch."""
        with self._lock:
            self._none_waits(step, table, rows.cpu(), f"stage '{stage}' of step {step + 1} reads")

    def updated(self, step: int, table: str, rows: Tensor, *, stage: str) -> None:
        """Refuse an update that comes twice, or before that of an earlier batch."""
        rows = rows.cpu()
        with self._lock:
            what = f"stage '{stage}' of step {step + 1} updates"
            self._none_waits(step, table, rows, what)
            waiting = self._waiting.get((table, step), rows[:0])
            strange = rows[~torch.isin(rows, waiting)]
            if len(strange):
                raise TrainingError(f"{what} row {int(strange[0])} of table {table!r} again, or without need")
            left = waiting[~torch.isin(waiting, rows)]
            self._waiting.pop((table, step), None)
            if len(left):
                self._waiting[table, step] = left

    def waiting(self) -> dict[tuple[str, int], int]:
        """Rows without their update, by table and step; nothing is left after a flush."""
        with self._lock:
            return {key: len(rows) for key, rows in self._waiting.items() if len(rows)}

    def _none_waits(self, step: int, table: str, rows: Tensor, what: str) -> None:
        for (name, earlier), waiting in self._waiting.items():
            if name == table and earlier < step:
                early = rows[torch.isin(rows, waiting)]
                if len(early):
                    raise TrainingError(
                        f"{what} row {int(early[0])} of table {table!r} before its update of step {earlier + 1}",
                        next_step="this is a bug of the schedule: use pipeline.prioritized=false and report it",
                    )
