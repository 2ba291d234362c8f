"""What one rank finds or fails at, told to all: they go on alike, or end together and with the same words."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from freescale.comm.world import Ranks
from freescale.errors import CheckpointError, DamagedCheckpointError, FreeScaleError
from freescale.trace import exchange

T = TypeVar("T")
Words = tuple[str, object, object, str | None, bool]


def gather(value: T, *, group: dist.ProcessGroup | None, what: str) -> list[T]:
    """The values of all ranks of a group, by rank, on each of them; `what` is its name in a timeline."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    with exchange(what):
        dist.all_gather_object(values, value, group=group)
    return values


def wait_for(work: dist.Work | None, *, what: str) -> None:
    """The end of an exchange that was begun some steps ago."""
    assert work is not None
    with exchange(what):
        work.wait()


def from_first(find: Callable[[], T], *, ranks: Ranks, what: str) -> T:
    """What rank 0 finds, on every rank; what it fails at, everybody does."""
    found, failure = None, None
    if ranks.is_first:
        try:
            found = find()
        except Exception as error:
            failure = error
    fail_together(failure, ranks=ranks, what=what)
    value: T = gather(found, group=ranks.control, what=what)[0]  # type: ignore[assignment]
    return value


def fail_together(
    failure: Exception | None, *, ranks: Ranks, what: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank where one has failed: on that rank its own error, on the others the same words.

    Args:
        failure: of this rank.
        ranks: who takes part.
        what: its name in a timeline.
        group: who talks to whom; the control group unless another is given.
    """
    own = _words(failure)
    told = [words for words in gather(own, group=group or ranks.control, what=what) if words is not None]
    if not told:
        return
    # Damage first: an earlier checkpoint may do, whatever else a rank made of this one.
    chosen = max(told, key=lambda words: words[-1])
    raise failure if failure is not None and own == chosen else _said(chosen)


def here(ranks: Ranks) -> str:
    """This rank, as messages name it."""
    return f"rank {ranks.rank} on {socket.gethostname()}"


def _words(failure: Exception | None) -> Words | None:
    if failure is None:
        return None
    if isinstance(failure, FreeScaleError):
        got = None if failure.got is None else str(failure.got)
        allowed = None if failure.allowed is None else str(failure.allowed)
        damaged = isinstance(failure, DamagedCheckpointError)
        return failure.what, got, allowed, failure.next_step, damaged
    return f"{type(failure).__name__}: {failure}", None, None, None, False


def _said(words: Words) -> CheckpointError:
    what, got, allowed, next_step, damaged = words
    kind = DamagedCheckpointError if damaged else CheckpointError
    return kind(what, got=got, allowed=allowed, next_step=next_step)
