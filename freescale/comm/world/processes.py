"""Which ranks of this machine are no more: the kernel tells as soon as a process has ended, killed or not."""

from __future__ import annotations

import os
import select
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from freescale.comm.world.facts import GroupFacts
from freescale.errors import FreeScaleError

# The connections of a process are closed before it has ended, and a GPU's memory is given back in between.
_ENDING_S = 3.0


class RanksEndedError(ConnectionError):
    """What those hear who wait for ranks that are no more."""

    @classmethod
    def of(cls, ranks: Sequence[int]) -> RanksEndedError:
        """The error that names them."""
        return cls(f"ranks {list(ranks)} have ended while rows were to be exchanged with them")


class Processes:
    """The processes of the other ranks; tells which have ended.

    Args:
        pids: by rank, those that mean something in this process.
    """

    def __init__(self, pids: dict[int, int]) -> None:
        self._files: dict[int, int] = {}
        for rank, pid in pids.items():
            if sys.platform == "linux" and pid != os.getpid():
                try:
                    self._files[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._files[rank] = -1
                except OSError:  # a kernel without them: time-outs tell
                    continue
        self._closed = weakref.finalize(self, _close, list(self._files.values()))

    def ended(self) -> list[int]:
        """Ranks whose process is no more."""
        return [rank for rank, file in self._files.items() if file < 0 or _has_ended(file)]


def _has_ended(file: int) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


def _close(files: list[int]) -> None:
    for file in files:
        if file >= 0:
            os.close(file)


def other_processes(facts: GroupFacts) -> Processes:
    """Those of the other ranks, as far as this process can see them."""
    own = facts.ranks[facts.rank]
    seen = {
        rank: each.pid
        for rank, each in enumerate(facts.ranks)
        if rank != facts.rank and each.processes == own.processes and each.machine == own.machine
    }
    return Processes(seen)


@contextmanager
def naming_the_ended(processes: Processes) -> Iterator[None]:
    """Whatever fails inside because ranks have ended says which."""
    try:
        yield
    except RanksEndedError:
        raise
    except (RuntimeError, OSError, FreeScaleError) as error:
        deadline = time.monotonic() + _ENDING_S
        while not (ended := processes.ended()):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        raise RanksEndedError.of(ended) from error
