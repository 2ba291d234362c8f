"""Which ranks of this machine are no more: the kernel tells as soon as a process has ended, killed or not."""

from __future__ import annotations

import os
import select
import sys
import weakref

from freescale.comm.facts import GroupFacts


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
