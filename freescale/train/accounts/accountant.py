"""Works out where the time of one rank's steps went, from its spans and what other ranks answer.

It takes about as long as 50 spans a step take Python: a millisecond a step, in which a thread that trains would do
nothing else. So it knows no device, no torch and no connection to other ranks, and can run in a process of its own
(`beside.py`); whoever it works for asks them for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from freescale.trace import Interval, Lengths, Parts, Span, SpanWriter, is_kept, lengths_of
from freescale.train.accounts.notes import Answers, Notes

_start_of = attrgetter("start")


class Due(NamedTuple):
    """An account that is to be made.

    Args:
        first: the oldest step that is not accounted for.
        up_to: the newest that may be.
        offset: what to add to this rank's clock.
        stalls: when this process stood still.
    """

    first: int
    up_to: int
    offset: float = 0.0
    stalls: Sequence[Interval] = ()


class ClosedStep(NamedTuple):
    """A step whose time is known."""

    step: int
    lengths: Lengths


class KeptStepParts(NamedTuple):
    """What else is written of a step: where its time went, and the CPU time it took where that is known."""

    step: int
    parts: Parts
    cpu: float | None


class _Written(NamedTuple):
    """A step that is written once its parts are known."""

    start: float
    end: float
    spans: list[Span]
    offset: float


class Accountant:
    """The steps of one rank that are not accounted for, and their spans.

    Args:
        rank: this one.
        alone: whether there is no other.
        spans: where the spans of kept steps go.
    """

    def __init__(self, *, rank: int, alone: bool, spans: SpanWriter | None = None) -> None:
        self._alone = alone
        self._writer = spans
        self._notes = Notes(rank=rank)
        self._spans: list[Span] = []
        self._ended: deque[tuple[int, float, float]] = deque()
        self._written: dict[int, _Written] = {}

    def begin(self) -> None:
        """Training goes on after a break in which nothing was recorded."""
        self._notes.begin()
        self._spans.clear()

    def hear(self, spans: Sequence[Span], ended: Iterable[tuple[int, float, float]]) -> None:
        """What has passed on this rank since the last time: spans, and (step, start, end) of steps."""
        if not self._alone:
            self._notes.hear(spans)
        self._spans.extend(spans)
        self._ended.extend(ended)

    def account(self, due: Due) -> Answers[list[ClosedStep]]:
        """Close the steps that every rank has behind it, oldest first."""
        # Later steps may have ended, too; they are not due yet.
        done = min(due.up_to, self._ended[-1][0]) if self._ended else due.first - 1
        until = next((end for step, _, end in reversed(self._ended) if step <= done), -float("inf"))
        self._notes.offset = due.offset
        if not self._alone:
            done = yield from self._notes.compare(
                self._spans, steps=range(due.first, due.up_to + 1), done=done, until=until, stalls=due.stalls
            )
        self._spans.sort(key=_start_of)
        return [self._close_step() for _ in range(done - due.first + 1)]

    def keep(self, kept: Iterable[KeptStepParts]) -> None:
        """Write the spans of these steps, where they are kept."""
        for step, parts, cpu in kept:
            found = self._written.pop(step, None)
            if found is not None and self._writer is not None:
                start, end, spans, offset = found
                self._writer.write(step, start, end, parts, spans, offset=offset, cpu=cpu)
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """No step follows."""
        if self._writer is not None:
            self._writer.close()

    def _close_step(self) -> ClosedStep:
        """Measure the oldest ended step and let go of the spans that lie behind it; spans are in order of their starts.

        An account closes many steps: each looks at its own spans, not at those of all that follow.
        """
        step, start, end = self._ended.popleft()
        num_begun = bisect_left(self._spans, end, key=_start_of)
        begun = self._spans[:num_begun]
        if self._writer is not None and is_kept(step):
            self._written[step] = _Written(start, end, begun, self._notes.offset)
        self._spans[:num_begun] = [span for span in begun if span.end > end]
        return ClosedStep(step, lengths_of(start, end, begun))
