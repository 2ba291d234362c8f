"""The stages a step is made of, as [steps, ranks] seconds; `engine.py` says what each does to the clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freescale.balance import FloatArray
from freescale.trace import MAIN

SIDE = "communication"
URGENT = "urgent rows"
"""The two lanes beside the training thread: what has time, and what the next batch waits for (split backward)."""

ALWAYS, LATER, LAST = "always", "not in the first", "only in the last"
"""The steps of a run that have a stage: all, those that others went before, the one that none follows."""


@dataclass(frozen=True, eq=False)
class Work:
    """Something a rank does by itself: [steps, ranks] seconds of compute, or of the host, in the steps that have it."""

    name: str
    seconds: FloatArray
    kind: str = "compute"
    lane: str = MAIN
    when: str = ALWAYS


@dataclass(frozen=True, eq=False)
class Exchange:
    """Something all ranks do together.

    Args:
        name: what travels.
        seconds: [steps, ranks] from the last arrival to the end, by each rank's own bytes.
        whole: nobody has everything before the slowest port is through (gradients at their owners, sums).
        lane: whose clock.
        lead: [steps, ranks] how long before its arrival a rank had the first piece ready; pieces then travel under
            the compute before.
        total: [steps, ranks] seconds of all pieces, with `lead`; `seconds` are those of the last piece.
        ready: name of the `Ready` with which a rank arrived; it goes on from there, and only here does it wait. One
            that stands further on in the program was reached in the step before, whose seconds count; in the first
            step there is nothing to wait for.
        when: which steps have it.
    """

    name: str
    seconds: FloatArray
    whole: bool = False
    lane: str = MAIN
    lead: FloatArray | None = None
    total: FloatArray | None = None
    ready: str | None = None
    when: str = ALWAYS


@dataclass(frozen=True)
class Ready:
    """The training thread arrives at an exchange that it waits for later in the step, or in the next one."""

    name: str


@dataclass(frozen=True)
class Start:
    """A lane beside the training thread goes on from here, not before."""

    lane: str = SIDE


@dataclass(frozen=True)
class Mark:
    """A lane has something ready under this name; others may wait for it."""

    name: str
    lane: str = SIDE


@dataclass(frozen=True)
class Wait:
    """A lane waits for what another has marked in the step before, or earlier in the program of this one."""

    name: str
    mark: str
    lane: str = MAIN
    this_step: bool = False


Stage = Work | Exchange | Ready | Start | Mark | Wait
Program = Sequence[Stage]


def has_turn(stage: Stage, *, step: int, num_steps: int) -> bool:
    """Whether a step of a run has this stage."""
    when = getattr(stage, "when", ALWAYS)
    return when == ALWAYS or (step > 0 if when == LATER else step == num_steps - 1)
