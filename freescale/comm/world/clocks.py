"""One time for all ranks: how far each machine's monotonic clock stands from that of rank 0.

Processes of one kernel and one time namespace share the clock. Between machines a rank of each plays a few rounds of
question and answer with rank 0; the fastest round bounds the error by half of what it took.

A kernel is known by the number it drew at its boot and by the machine's name; copies of a running machine share the
number, and may share the name. So those that claim to share a clock read it between two meetings: a reading that does
not lie between one's own before and after them comes from another clock.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from freescale.comm.world.agreement import gather
from freescale.comm.world.facts import boot_id, namespace
from freescale.comm.world.ranks import Ranks

# Two clocks drift apart: 100 millionths is more than crystals of two machines differ by, steered or not.
_DRIFT = 1e-4


@dataclass(frozen=True)
class _Offset:
    """What to add to a clock, by how much that may be wrong, and when it was measured."""

    seconds: float
    error: float
    measured: float

    def error_at(self, now: float) -> float:
        """By how much it may be wrong by now."""
        return self.error + _DRIFT * (now - self.measured)


class SharedClock:
    """Seconds to add to this rank's monotonic clock to have that of rank 0.

    Args:
        ranks: who takes part.
        clock: this process's clock, in seconds.
        machine: what processes that share a clock have in common.

    `origin` is a moment of rank 0's clock that all ranks know: time zero of the run. `error` bounds that of `offset`,
    `largest_error` that of any rank's.
    """

    def __init__(
        self, ranks: Ranks, *, clock: Callable[[], float] = time.monotonic, machine: str | None = None
    ) -> None:
        self.offset = 0.0
        self.error = self.largest_error = 0.0
        self.origin = clock()
        self._ranks, self._clock = ranks, clock
        self._speakers: list[int] = []
        self._mine = 0
        self._known: dict[int, _Offset] = {}
        if ranks.control is None:
            return
        names = self._names(_this_machine() if machine is None else machine)
        self._speakers = [names.index(name) for name in dict.fromkeys(names)]
        self._mine = self._speakers.index(names.index(names[ranks.rank]))
        self.measure()
        zero = torch.tensor([self.origin], dtype=torch.float64)
        dist.broadcast(zero, src=0, group=ranks.control)
        self.origin = float(zero)

    @property
    def num_machines(self) -> int:
        """Clocks among the ranks."""
        return max(1, len(self._speakers))

    def measure(self, *, rounds: int = 8) -> None:
        """Compare the clocks again; every rank must call it. Costs nothing where all ranks share one machine.

        What was measured before is kept where it is more exact, for all the two may have drifted apart since.
        """
        if len(self._speakers) < 2:
            return
        table = torch.zeros(2, len(self._speakers), dtype=torch.float64)
        for place, speaker in enumerate(self._speakers[1:], 1):
            if self._ranks.is_first:
                table[0, place], table[1, place] = self._better(speaker, self._ask(speaker, rounds))
            elif self._ranks.rank == speaker:
                self._answer(rounds)
        dist.broadcast(table, src=0, group=self._ranks.control)
        self.offset, self.error = float(table[0, self._mine]), float(table[1, self._mine])
        self.largest_error = float(table[1].max())

    def _names(self, machine: str) -> list[str]:
        """The machine of every rank; one whose clock is not that of the first with its name has a name to itself."""
        group = self._ranks.control
        names = gather(machine, group=group)
        before = self._clock()
        self._ranks.barrier()
        readings = [torch.zeros(1, dtype=torch.float64) for _ in names]
        mine = torch.tensor([self._clock()], dtype=torch.float64)
        dist.all_gather(readings, mine, group=group)
        first = float(readings[names.index(machine)])
        if not before <= first <= self._clock():
            machine = f"{machine} rank {self._ranks.rank}"
        return gather(machine, group=group)

    def _better(self, speaker: int, new: _Offset) -> tuple[float, float]:
        """The new offset of a machine, or the one known, with its error by now."""
        old = self._known.get(speaker)
        if old is not None and old.error_at(new.measured) < new.error:
            return old.seconds, old.error_at(new.measured)
        self._known[speaker] = new
        return new.seconds, new.error

    def _ask(self, speaker: int, rounds: int) -> _Offset:
        """What to add to the speaker's clock, as the fastest round tells."""
        best = _Offset(0.0, float("inf"), 0.0)
        note = torch.zeros(1, dtype=torch.float64)
        for _ in range(rounds):
            asked = self._clock()
            dist.send(note, dst=speaker, group=self._ranks.control)
            dist.recv(note, src=speaker, group=self._ranks.control)
            heard = self._clock()
            if (heard - asked) / 2 < best.error:
                best = _Offset((asked + heard) / 2 - float(note), (heard - asked) / 2, heard)
        return best

    def _answer(self, rounds: int) -> None:
        note = torch.zeros(1, dtype=torch.float64)
        for _ in range(rounds):
            dist.recv(note, src=0, group=self._ranks.control)
            note[0] = self._clock()
            dist.send(note, dst=0, group=self._ranks.control)


def _this_machine() -> str:
    """A name that processes with one clock share; without a number of its boot, this process counts as a machine."""
    boot = boot_id() or f"process {time.monotonic_ns()}"
    return f"{boot} {platform.node()} {namespace('time')}"
