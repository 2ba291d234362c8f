"""What one rank finds or fails at, told to all: they go on alike, or end together and with the same words."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from freescale import errors
from freescale.comm.world.watch import in_words, mark_own
from freescale.errors import DamagedCheckpointError, FreeScaleError, PeerError
from freescale.trace import exchange

if TYPE_CHECKING:
    from freescale.comm.world.ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class _Words:
    """What a rank says of its failure.

    Args:
        rank: who, as messages name it.
        what: in one sentence.
        kind: the name of its class in `freescale.errors`; None for an error nobody foresaw.
        got: as in `FreeScaleError`.
        allowed: as in `FreeScaleError`.
        next_step: as in `FreeScaleError`.
    """

    rank: str = field(compare=False)
    what: str
    kind: str | None = None
    got: str | None = None
    allowed: str | None = None
    next_step: str | None = None


def gather(value: T, *, group: dist.ProcessGroup | None, what: str | None = None) -> list[T]:
    """The values of all ranks of a group, by rank, on each of them; `what` is its name in a timeline, if it has one."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    with nullcontext() if what is None else exchange(what):
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
    """Raise on every rank where one has failed: on that rank its own error, on the others one of the same class.

    An error nobody foresaw stays with the rank that met it: on the others it is a `PeerError` that names the rank, so
    that nobody takes what they say for the cause.

    Args:
        failure: of this rank.
        ranks: who takes part.
        what: its name in a timeline.
        group: who talks to whom; the control group unless another is given.
    """
    own = None if failure is None else _words(failure, here(ranks))
    told = [words for words in gather(own, group=group or ranks.control, what=what) if words is not None]
    if not told:
        return
    chosen = max(told, key=_weight)
    if failure is not None and (own == chosen or chosen.kind is None):
        mark_own(failure)  # all ranks have just been heard: it is none of theirs, whatever it looks like
        raise failure
    raise _said(chosen)


def here(ranks: Ranks) -> str:
    """This rank, as messages name it."""
    return f"rank {ranks.rank} on {socket.gethostname()}"


def _words(failure: Exception, rank: str) -> _Words:
    if not isinstance(failure, FreeScaleError):
        return _Words(rank, in_words(failure))
    # A class from elsewhere may not be there on every rank, or want other arguments.
    kind = next(kind for kind in type(failure).__mro__ if kind.__module__ == errors.__name__)
    got = None if failure.got is None else str(failure.got)
    allowed = None if failure.allowed is None else str(failure.allowed)
    return _Words(rank, failure.what, kind.__name__, got, allowed, failure.next_step)


def _weight(words: _Words) -> int:
    """Damage first: an earlier checkpoint may do, whatever else a rank made of this one. Then what has a message."""
    return 2 if words.kind == DamagedCheckpointError.__name__ else int(words.kind is not None)


def _said(words: _Words) -> FreeScaleError:
    if words.kind is None:
        return PeerError(f"{words.rank} failed: {words.what}")
    kind: type[FreeScaleError] = getattr(errors, words.kind)
    error = kind(words.what, got=words.got, allowed=words.allowed, next_step=words.next_step)
    error.met_by = words.rank
    return error
