"""What an evaluation asks, batch by batch: kept from the second time on that the same is asked."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from freescale.data import Examples, IntArray, SequenceBatch
from freescale.train.item_vectors import FoundRows
from freescale.train.quality.full_ranking import AskedOfDevice

_ROOM = 64 << 20
"""Page-locked memory comes in powers of two, so it may be twice as much."""


class EvalBatch(NamedTuple):
    """Users and what is known of them before any model looks.

    Args:
        rows: of the users.
        batch: their histories; on the CPU, unless their rows are found.
        asked: what their targets are ranked among; None where nothing is ranked.
        found: the rows of what they mention; None where ids may change theirs.
    """

    rows: IntArray
    batch: SequenceBatch
    asked: AskedOfDevice | None
    found: FoundRows | None = None

    @property
    def nbytes(self) -> int:
        """What it takes to keep it."""
        own = self.rows.nbytes + sum(tensor.nbytes for tensor in (self.batch.offsets, *self.batch.features()))
        return own + sum(part.nbytes for part in (self.asked, self.found) if part is not None)


@dataclass
class EvalBatches:
    """Batches of the evaluation that was made last: the first of them stay, as many as there is room for.

    What is asked once (a window of a log, test targets) leaves nothing.

    Args:
        room: bytes of this process, or of its GPU.
    """

    room: int = _ROOM
    _of: weakref.ref[Examples] | None = None
    _parts: list[IntArray] = field(default_factory=list)
    _kept: list[EvalBatch] = field(default_factory=list)

    def of(
        self, examples: Examples, parts: Sequence[IntArray], make: Callable[[IntArray], EvalBatch]
    ) -> Iterator[EvalBatch]:
        """A batch of each part, from the last time or made anew.

        Args:
            examples: whose rows are named, and which stay what they are; others than those before take their place,
                once they are asked again.
            parts: rows of each batch.
            make: rows -> what is known of them.
        """
        again = self._of is not None and self._of() is examples and _alike(self._parts, parts)
        if not again:
            self._of, self._parts, self._kept = weakref.ref(examples), list(parts), []
        left = self.room - sum(one.nbytes for one in self._kept) if again else 0
        for number, rows in enumerate(parts):
            if number < len(self._kept):
                yield self._kept[number]
                continue
            made = make(rows)
            left -= made.nbytes
            if left >= 0:  # never again once it was too much: those kept are the first ones
                self._kept.append(made)
            yield made


def _alike(some: Sequence[IntArray], others: Sequence[IntArray]) -> bool:
    return len(some) == len(others) and all(map(np.array_equal, some, others))
