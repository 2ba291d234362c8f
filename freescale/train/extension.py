"""StepExtension: what takes part in every step beside loss and time, and tells of it in the log.

A run has any number of them. Each brings numbers of its own to the one sum over ranks that a step's report needs
anyway, gets the sum back, and turns it into fields of the step's line. The loop, the reports and the checkpoints know
nothing else about it:

    begin ─> forward and backward ─> counts ─> all-reduce with the loss ─> fields       every step
    picture, state_dict                                                                 evaluations and checkpoints
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from freescale.balance import StepPlan
from freescale.errors import ConfigError
from freescale.pipeline import ReadyBatch

# Events of the run itself, and what its own tensors in a checkpoint begin with.
_EVENTS = (
    "start",
    "step",
    "tick",
    "eval",
    "balance",
    "pipeline",
    "postpone",
    "ranks",
    "checkpoint",
    "notice",
    "end",
)
_NAMES_TAKEN = frozenset((*_EVENTS, "model", "optimizer", "table"))
# Fields that a line gets after those of the extensions.
_TIMES = ("step_ms", "tokens_per_s", "bubble", "straggler", "comm", "host", "slowest", "slowest_by")
_FIELDS_TAKEN = frozenset((*_TIMES, "event", "step", "time", "grad_norm"))


class StepExtension(Protocol):
    """Counts something in every step; may act on the sum over all ranks, as balanced routers do.

    Every rank has the same extensions in the same order, and each returns as many counts on every rank: they travel
    in one tensor. `begin`, `counts` and `fields` are called for every step, in this order; `fields` may come after the
    next step has begun (on a GPU, or between machines), or the one after that (both) unless it `acts`; always before an
    evaluation or a checkpoint. Who acts on the counts of a step and wants the one curve does so two steps later.
    """

    @property
    def name(self) -> str:
        """Name of its event in the log, and what its tensors in a checkpoint begin with."""

    @property
    def acts(self) -> bool:
        """Whether the step after the next depends on what `fields` is told of a step."""

    def begin(self, ready: ReadyBatch) -> None:
        """A step begins with this batch, on this rank."""

    def counts(self, step: int) -> Tensor:
        """This rank's numbers of a step (from 0), to be summed over the ranks; on any device, may be empty."""

    def check(self, counts: Tensor) -> None:
        """Raise where these numbers of this rank tell why a step has no finite loss; called for such steps only."""

    def fields(self, summed: Tensor, plan: StepPlan) -> Mapping[str, object]:
        """Fields of the step's line from the sum over all ranks (float64, on the CPU), the same on every rank."""

    def picture(self) -> Mapping[str, object] | None:
        """The whole picture at an evaluation or a checkpoint, an event of its own; None: nothing to tell."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must keep, in place; its names get the extension's in front."""

    def restored(self) -> None:
        """The tensors of `state_dict` were filled from a checkpoint."""


def check_names(extensions: Sequence[StepExtension]) -> None:
    """Refuse extensions whose events or tensors could not be told from others."""
    for name, times in Counter(extension.name for extension in extensions).items():
        if times > 1 or name in _NAMES_TAKEN or not name.isidentifier():
            raise ConfigError(
                f"an extension of a run cannot be called {name!r}",
                got=", ".join(repr(extension.name) for extension in extensions),
                allowed="names that differ, of letters and digits, and none of "
                + ", ".join(sorted(_NAMES_TAKEN)),
                next_step="give the extension another name",
            )


def check_fields(extension: StepExtension, names: Iterable[str], *, line: Mapping[str, object]) -> None:
    """Refuse fields that a step's line already has: one of the two would be lost."""
    twice = sorted(name for name in names if name in line or name in _FIELDS_TAKEN)
    if twice:
        raise ConfigError(
            f"the line of a step has {', '.join(map(repr, twice))} already",
            got=f"fields of the extension {extension.name!r}",
            next_step=f"call them {', '.join(f'{extension.name}_{name}' for name in twice)}",
        )
