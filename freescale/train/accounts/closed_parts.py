"""Where the time of a closed step went, by what is known of this rank's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from freescale.trace import Parts, Recorder
from freescale.train.accounts.accountant import ClosedStep
from freescale.train.accounts.busy_meter import BusyMeter


class ClosedParts(NamedTuple):
    """A step of one rank, split: its parts, dry share, whether the busy time is known, and whether it was watched."""

    parts: Parts
    dry: float = 0.0
    known: bool = True
    watched: bool = False

    def numbers(self) -> tuple[float, ...]:
        """As they travel."""
        parts = self.parts
        return (
            parts.total,
            parts.compute,
            parts.straggler,
            parts.comm,
            self.dry,
            self.known,
            self.watched,
        )

    @classmethod
    def of_numbers(cls, row: Sequence[float]) -> ClosedParts:
        """As they were before they travelled."""
        return cls(Parts(*row[:4]), row[4], bool(row[5]), bool(row[6]))


def split_step(one: ClosedStep, recorder: Recorder, busy: BusyMeter | None, *, is_alone: bool) -> ClosedParts:
    """Split a step; what the recorder has noted of it is forgotten.

    Args:
        one: the step.
        recorder: its notes of it.
        busy: how long the device works in its stretches; None: all of the time.
        is_alone: there are no other ranks, so what is copied outside of stretches is this one's work.
    """
    step, lengths = one
    if busy is None:
        return ClosedParts(lengths.parts())
    notes, known = recorder.notes_of(step), True
    recorder.forget(step)
    dry = busy.dry_share(notes.lags)

    copied = 0.0

    def worked(stretch_s: float, replayed_s: float) -> float:
        nonlocal known, copied
        outside_s = lengths.total - stretch_s - replayed_s
        copied = busy.times.copies_s(outside_s, lengths.total, replayed=replayed_s > 0)
        found = busy.times.busy_s(notes.load, stretch_s, lags=notes.lags, replayed=replayed_s > 0, dry=dry)
        known = found is not None
        return stretch_s if found is None else found

    parts = lengths.parts(worked)
    if is_alone and copied > 0:
        compute = parts.compute + min(copied, max(0.0, parts.host))
        parts = Parts(parts.total, compute, parts.straggler, parts.comm)
    return ClosedParts(parts, dry, known, busy.was_watched(step))
