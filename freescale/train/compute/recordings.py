"""Recordings: which padded batches are replayed, when their sizes are recorded, and why other batches are not.

Sizes that are foreseen are recorded together, when the first batch of them comes that has all its lists; others when
they are met again. A batch that is not replayed is computed as usual, with the same bits, and counted with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freescale.pipeline import MOST_SIZES, PaddedBatch
from freescale.train.compute.postponed_pieces import DensePiece
from freescale.train.compute.recorder import CutGraph, Recorder

RECORD_AT = 2
"""How often a size that was not foreseen is met before it is recorded: what comes once never pays."""

MOST_RECORDINGS = MOST_SIZES + 4
"""Of foreseen sizes, and some others. Each takes 10 to 60 MB of the driver's memory."""

_MOST_RARE = 200
_FIRST_STEP, _EARLY = "the first step", "made ready before all was known that its kernels read"
_TOO_LARGE, _RARE = "too large for one copy", "of a size that was not foreseen"
_MANY_PAIRS = "with more pairs of tokens than gradients are kept for"
_FULL, _FAILED, _OFF = "of too many sizes", "that could not be recorded", "while nothing is recorded"

PostponedGraphs = Sequence[tuple[torch.cuda.CUDAGraph | None, tuple[DensePiece, ...]]]
"""Graphs of gradients that are put off, and the pieces of all gradients that are complete behind each."""


@dataclass(frozen=True, eq=False)
class Recording:
    """Graphs, what they read of a batch, what must live as long as they do; and what is computed later.

    `updates` are the weights (by id) that its forward updates itself when it comes to their layers; None where some of
    their updates are in it and others are not.
    """

    graphs: Sequence[CutGraph]
    memory: Tensor
    batch: PaddedBatch
    later: PostponedGraphs
    updates: frozenset[int] | None = frozenset()


class Recordings:
    """Those of a run, by what all batches have in common that can be replayed from them.

    Args:
        recorder: says whether any are made, and is told why there will be no more.
        record: makes that of a batch's size, from the same batch in memory of its own; None where it cannot.
    """

    def __init__(
        self, recorder: Recorder, record: Callable[[PaddedBatch, Tensor, PaddedBatch], Recording | None]
    ) -> None:
        self._recorder, self._make = recorder, record
        self.made: dict[tuple[Any, ...], Recording] = {}
        self.can_begin = False
        """After the first step, which shows what kernels read."""
        self.replays = 0
        self.usual: Counter[str] = Counter()
        """Why batches were computed as usual, and how many."""
        self._met: Counter[tuple[Any, ...]] = Counter()
        self._ahead = False

    def find(self, padded: PaddedBatch) -> Recording | None:
        """One that takes this batch: made ready before parcels had grown, it may not lie in one piece as others do."""
        return self.made.get(padded.key) if padded.copyable else None

    def will_replay(self, padded: PaddedBatch) -> bool:
        """Whether a batch will be replayed; records its size where it is time to, and with it all that are foreseen."""
        reason = None if self.find(padded) is not None else self._why_not(padded)
        if reason is not None:
            self.usual[reason] += 1
        self.replays += reason is None
        return reason is None

    def will_replay_all(self, parts: Sequence[PaddedBatch]) -> bool:
        """Whether all of a step's micro-batches will be replayed; each is asked."""
        recorded = [self.will_replay(part) for part in parts]
        return all(recorded)

    def share(self) -> float:
        """Of all padded batches so far, those that were replayed."""
        return self.replays / max(1, self.replays + sum(self.usual.values()))

    def story(self) -> str | None:
        """How many batches were replayed, and why others were not; None where none was padded."""
        others = sum(self.usual.values())
        if not others + self.replays:
            return None
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.usual.most_common())
        total = self.replays + others
        told = f"{self.replays:,} of {total:,} batches replayed from {len(self.made)} recordings"
        return f"{told}; not replayed: {reasons}" if reasons else told

    def _why_not(self, padded: PaddedBatch) -> str | None:
        """Why a batch is not replayed; None: it was recorded now."""
        if not self._recorder.on:
            return _OFF
        if not self.can_begin:
            return _FIRST_STEP
        if not padded.in_one_piece:
            return _TOO_LARGE
        if not padded.fixed:
            return _MANY_PAIRS
        self._met[padded.key] += 1
        if padded.foreseen is None and self._met[padded.key] < RECORD_AT:
            if self.usual[_RARE] == _MOST_RARE and not self.made:
                self._recorder.give_up(f"no size of a batch came {RECORD_AT} times in {_MOST_RARE} steps")
            return _RARE
        if len(self.made) >= MOST_RECORDINGS:
            self._recorder.give_up(f"those of rarer sizes, as batches come in more than {MOST_RECORDINGS}")
            return _FULL
        if padded.foreseen is not None and not self._ahead:
            if _again(padded)[1].key != padded.key:
                return _EARLY  # the next one is not
            self._ahead = True
            self._record_foreseen(padded.foreseen())
        if padded.key in self.made:
            return None
        return self._record(padded) if self._recorder.on else _FAILED

    def _record_foreseen(self, sizes: Iterable[PaddedBatch]) -> None:
        """The largest comes first: in the memory it takes, all others find room."""
        for other in sizes:
            if not self._recorder.on:
                break
            new = other.copyable and other.key not in self.made
            if new and len(self.made) < MOST_RECORDINGS:
                self._record(other)

    def _record(self, padded: PaddedBatch) -> str | None:
        """Record the size of this batch, if all that its kernels read is among what travels with it; else why not."""
        memory, again = _again(padded)
        if again.key != padded.key:
            return _EARLY
        made = self._make(padded, memory, again)
        if made is None:
            return _FAILED
        self.made[padded.key] = made
        padded.replayed.add(padded.key)
        return None


def _again(padded: PaddedBatch) -> tuple[Tensor, PaddedBatch]:
    """The same batch in memory of its own; with more lists, if not all were known that its kernels read."""
    memory = torch.empty(padded.num_bytes, dtype=torch.uint8, device=padded.memory[0].device)
    return memory, padded.again(memory)
