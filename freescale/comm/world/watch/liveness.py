"""Who is alive and for whom the others wait, as far as signs of life tell."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType

from freescale.comm.world.watch.said import Said
from freescale.trace import stage_of_main_thread

BEAT_S = 1.0
"""A sign of life as often as this."""
RESUMES = "the same command goes on from the last checkpoint"
_LATE_S = 10.0
_AGAIN_S = 3 * _LATE_S
_STUCK_S = 120.0
"""Ranks that compute may be where they are for longer than ranks that wait: a long evaluation, a compilation."""
_QUIET_S = 3 * BEAT_S
# A watcher that slept longer than this between two looks was stopped itself.
_ASLEEP_S = 5 * BEAT_S


@dataclass(frozen=True, kw_only=True)
class SignOfLife(Said):
    """What a rank says every second.

    Args:
        pid: its process.
        seconds: for how long, with nothing changed.
        waits: whether it waits for other ranks.
        line: the line of code it is at.
        silent_s: how long the others may hear nothing from it.
    """

    pid: int
    seconds: float
    waits: bool
    line: str
    silent_s: float


class Pulse:
    """Signs of life of this process; asked for by a thread of its own, so a main thread that waits does not matter.

    Args:
        rank: this one.
        silent_s: how long the others may hear nothing from it.
    """

    def __init__(self, rank: int, *, silent_s: float) -> None:
        self._rank, self._silent_s = rank, silent_s
        self._main = threading.main_thread().ident
        self._host = socket.gethostname()
        self._last: tuple[str, int | None] = ("", None)
        self._since = time.monotonic()

    def take(self) -> SignOfLife:
        """One sign, as of now."""
        where, now = stage_of_main_thread(), time.monotonic()
        if where != self._last:
            self._last, self._since = where, now
        waits, line = _where_it_stands(sys._current_frames().get(self._main or 0))
        return SignOfLife(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            stage=where[0],
            step=where[1],
            seconds=now - self._since,
            waits=waits,
            line=line,
            silent_s=self._silent_s,
        )


def _where_it_stands(frame: FrameType | None) -> tuple[bool, str]:
    """Whether a thread is inside an exchange, and the line of ours it is at."""
    waits, line = False, ""
    # The thread runs on meanwhile, and Python 3.11 was seen to hand out something else for a frame that it had left:
    # then the thread is somewhere else by now. Who gives signs of life must not end over it.
    while isinstance(frame, FrameType):
        path = frame.f_code.co_filename.replace(os.sep, "/")
        waits = waits or "/torch/distributed/" in path or "/freescale/comm/t" in path
        if not line and "/freescale/" in path:
            line = f"{path.rpartition('/freescale/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return waits, line


@dataclass
class _Member:
    sign: SignOfLife
    heard: float

    def for_s(self, now: float) -> float:
        """How long it has been where it is."""
        return self.sign.seconds + now - self.heard

    def describe(self, now: float) -> str:
        """Who it is and what it does."""
        quiet = now - self.heard
        doing = f"silent for {quiet:.0f} s" if quiet > _QUIET_S else self.sign.line
        return f"rank {self.sign.rank} on {self.sign.host}, {self.sign.where} for {self.for_s(now):.0f} s ({doing})"


class Liveness:
    """Keeps the last sign of every rank, and judges.

    Args:
        num_ranks: how many there are.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._members: dict[int, _Member] = {}
        self._left: set[int] = set()
        self._looked = time.monotonic()
        self._next: float | None = None

    def heard(self, sign: SignOfLife, *, now: float | None = None) -> None:
        """A rank has given a sign."""
        self._members[sign.rank] = _Member(sign, time.monotonic() if now is None else now)
        self._left.discard(sign.rank)

    def left(self, rank: int) -> None:
        """A rank has said good-bye; its process may take part in another run."""
        self._members.pop(rank, None)
        self._left.add(rank)

    def look(self, *, now: float | None = None) -> None:
        """Call it often: time in which the one who looks was stopped himself does not count against the others."""
        now = time.monotonic() if now is None else now
        asleep = now - self._looked
        if asleep > _ASLEEP_S:
            for member in self._members.values():
                member.heard += asleep
        self._looked = now

    def sign_of(self, rank: int) -> SignOfLife | None:
        """The last one."""
        member = self._members.get(rank)
        return member.sign if member else None

    def silent(self, *, now: float | None = None) -> SignOfLife | None:
        """A rank that has been silent for too long."""
        now = time.monotonic() if now is None else now
        over = [each for each in self._members.values() if now - each.heard > each.sign.silent_s]
        return min(over, key=lambda each: each.heard).sign if over else None

    def late(self, *, now: float | None = None) -> str | None:
        """Whom the others wait for, or that nobody moves; now and then while it is so, None when all goes on."""
        now = time.monotonic() if now is None else now
        stood = min((each.for_s(now) for each in self._members.values()), default=0.0)
        story, again_s = self._story(stood, now)
        if story is None:
            self._next = None
        elif self._next is None or now >= self._next:
            self._next = now + again_s
            return story
        return None

    def _story(self, stood: float, now: float) -> tuple[str | None, float]:
        """What is to be said of ranks that have all been where they are for so long, and when to say it again."""
        members = list(self._members.values())
        behind = [each for each in members if not each.sign.waits or now - each.heard > _QUIET_S]
        together = len(members) + len(self._left)
        if stood < _LATE_S or together < max(2, self._num_ranks):
            return None, 0.0
        if self._left and not behind:
            ranks = ", ".join(map(str, sorted(self._left)))
            return f"waiting for ranks that are not back from the run before: {ranks}", _AGAIN_S
        if self._left:
            return None, 0.0
        if not behind:
            return f"nothing moves: all ranks wait for each other; {_describe(members, now)}", _AGAIN_S
        if len(behind) < len(members):
            return f"waiting for {_describe(behind, now)}", _AGAIN_S
        if stood < _STUCK_S:
            return None, 0.0
        where = f"no rank has come further for {stood:.0f} s, and none waits for another"
        return f"{where}; {_describe(members, now)}: long work, or a GPU that does not end it", stood


def _describe(members: list[_Member], now: float) -> str:
    return "; ".join(each.describe(now) for each in members[:4])


def silence(sign: SignOfLife) -> str:
    """What is said of a rank that gives no sign of life."""
    return (
        f"rank {sign.rank} on {sign.host} has given no sign of life for {sign.silent_s:g} s, last {sign.where}: its"
        " process is stopped, a call does not let go of its interpreter, or its machine is down or cut off\n"
        f"  next:    {RESUMES}; comm.silent_s allows more"
    )
