"""How much of the weight gradients waits until the rows have left, decided by measuring steps of the run itself.

At fixed steps, 2 probes after those at which the way of rows is tried (`adaptive.py`), PROBE steps each postpone
everything, half of it, and nothing; then all go on with the fastest. (Where ways are tried more often than every 6
probes, the two may meet; such a trial decides nothing.)

    chosen share ... │ everything │ half │ nothing │ chosen share ... (agree) ... the fastest
                     │ PROBE steps each, measured  │

Every share gives the same bits, so a decision moves time, never the curve. Decisions are logged, kept in checkpoints,
and off with `pipeline.decide_every=null`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from freescale.comm.world import Ranks
from freescale.pipeline.prioritized.trials import PROBE, Choices, Trials

SHARES = (1.0, 0.5, 0.0)
"""From the one a run begins with; an earlier one is kept unless a later one is faster by more than noise."""
_GAIN = 0.01


class PostponeShare:
    """Which share of the weight gradients a step postpones.

    Args:
        ranks: who agrees.
        every: steps before the first trial; None: none, everything is postponed.
        hides: step -> whether its traffic is hidden; a trial in which some is not decides nothing.
    """

    def __init__(self, *, ranks: Ranks, every: int | None, hides: Callable[[int], bool]) -> None:
        self._hides = hides
        self._trials = Trials(
            ranks=ranks,
            every=every,
            least=6 * PROBE,
            subject="what is postponed",
            num_probes=len(SHARES),
            late=2 * PROBE,
        )
        self._decisions = Choices(SHARES[0])

    def share(self, step: int) -> float:
        """What a step (counted from 0) postpones of all it can."""
        probe = self._trials.probe_of(step)
        return self._decisions.at(step) if probe is None else SHARES[probe]

    def observe(self, step: int, ms: float) -> None:
        """How long a step (from 0) took on this rank."""
        self._trials.observe(step, ms)

    def agree(self, step: int) -> dict[str, object] | None:
        """After a step (from 0): where a trial has just ended, decide with all ranks. What was decided, for the log."""
        start = self._trials.ended_with(step)
        if start is None:
            return None
        firsts = range(start, step + 1, PROBE)
        took = self._trials.pooled([range(first, first + PROBE) for first in firsts])
        if not all(took) or not all(map(self._hides, range(start, step + 1))):
            return None
        best = 0
        for n in range(1, len(SHARES)):
            if took[n] < (1 - _GAIN) * took[best]:
                best = n
        from_step, before = step + 1, self._decisions.at(step)
        if SHARES[best] != before:
            self._decisions.add(from_step, SHARES[best])
        return {
            "share": SHARES[best],
            "changed": SHARES[best] != before,
            "from_step": from_step + 1,
            "ms": {f"{share:g}": round(ms, 3) for share, ms in zip(SHARES, took)},
        }

    def state(self) -> list[list[float]]:
        """All decisions, for a checkpoint."""
        return [[step, share] for step, share in self._decisions.state()]

    def load_state(self, decisions: Sequence[Sequence[float]]) -> None:
        """Take the decisions of a checkpoint over; without any, everything is postponed."""
        self._decisions.load(decisions, read=float, subject="decisions on what is postponed")
