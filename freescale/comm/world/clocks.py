"""One time for all ranks: how far each machine's monotonic clock stands from that of rank 0.

Processes of one machine share the clock. Between machines a rank of each plays a few rounds of question and answer with
rank 0; the fastest round bounds the error by half of what it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from freescale.comm.world.ranks import Ranks

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharedClock:
    """Seconds to add to this rank's monotonic clock to have that of rank 0.

    Args:
        ranks: who takes part.
        clock: this process's clock, in seconds.
        machine: what processes that share a clock have in common.

    `origin` is a moment of rank 0's clock that all ranks know: time zero of the run. `error` bounds that of `offset`.
    """

    def __init__(
        self, ranks: Ranks, *, clock: Callable[[], float] = time.monotonic, machine: str | None = None
    ) -> None:
        self.offset = 0.0
        self.error = 0.0
        self.origin = clock()
        self._ranks, self._clock = ranks, clock
        self._speakers: list[int] = []
        self._mine = 0
        if ranks.control is None:
            return
        names: list[str] = [""] * ranks.num_ranks
        dist.all_gather_object(names, _this_machine() if machine is None else machine, group=ranks.control)
        self._speakers = [names.index(name) for name in dict.fromkeys(names)]
        self._mine = self._speakers.index(names.index(names[ranks.rank]))
        self.measure()
        zero = torch.tensor([self.origin], dtype=torch.float64)
        dist.broadcast(zero, src=0, group=ranks.control)
        self.origin = float(zero)

    def measure(self, *, rounds: int = 8) -> None:
        """Compare the clocks again; every rank must call it. Costs nothing where all ranks share one machine."""
        if len(self._speakers) < 2:
            return
        table = torch.zeros(2, len(self._speakers), dtype=torch.float64)
        for place, speaker in enumerate(self._speakers[1:], 1):
            if self._ranks.is_first:
                table[0, place], table[1, place] = self._ask(speaker, rounds)
            elif self._ranks.rank == speaker:
                self._answer(rounds)
        dist.broadcast(table, src=0, group=self._ranks.control)
        self.offset, self.error = float(table[0, self._mine]), float(table[1, self._mine])

    def _ask(self, speaker: int, rounds: int) -> tuple[float, float]:
        """What to add to the speaker's clock, and by how much that may be wrong."""
        best = (0.0, float("inf"))
        note = torch.zeros(1, dtype=torch.float64)
        for _ in range(rounds):
            asked = self._clock()
            dist.send(note, dst=speaker, group=self._ranks.control)
            dist.recv(note, src=speaker, group=self._ranks.control)
            heard = self._clock()
            if (heard - asked) / 2 < best[1]:
                best = ((asked + heard) / 2 - float(note), (heard - asked) / 2)
        return best

    def _answer(self, rounds: int) -> None:
        note = torch.zeros(1, dtype=torch.float64)
        for _ in range(rounds):
            dist.recv(note, src=0, group=self._ranks.control)
            note[0] = self._clock()
            dist.send(note, dst=0, group=self._ranks.control)


def _this_machine() -> str:
    """A name that the processes of one running system share; without one, this process counts as a machine."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"process {time.monotonic_ns()}"
