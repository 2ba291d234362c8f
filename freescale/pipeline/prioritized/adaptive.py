"""Whether hiding the traffic pays, decided by measuring both ways in the run itself.

At fixed steps (`trials.py`) a few go the other way than the rest:

    chosen way ... chosen way │ other way, PROBE steps │ chosen way ... (agree) ... the faster way
                   measured   │ measured               │

The two ways give the same bits, so a decision moves time, never the curve. Decisions are logged, kept in checkpoints,
and off with `pipeline.decide_every=null`.
"""

from __future__ import annotations

from collections.abc import Sequence

from freescale.comm.world import Ranks
from freescale.pipeline.prioritized.trials import PROBE, UNSETTLED, Choices, Trials

# Less than this is noise, and a change for nothing would be made again and again.
_GAIN = 0.02


class Switch:
    """Which steps send their ids ahead.

    Args:
        on: the way the run begins with.
        ranks: who agrees.
        every: steps before the first probe; None: no probe, the way is fixed.
    """

    def __init__(self, *, on: bool, ranks: Ranks, every: int | None) -> None:
        self._trials = Trials(ranks=ranks, every=every, least=3 * PROBE, subject="the way")
        self._decisions = Choices(on)

    def prioritized(self, step: int) -> bool:
        """Whether a step (counted from 0) goes the prioritized way."""
        probing = self._trials.probe_of(step) is not None
        return self._decisions.at(step) != probing

    def observe(self, step: int, ms: float) -> None:
        """How long a step (from 0) took on this rank."""
        self._trials.observe(step, ms)

    def agree(self, step: int) -> dict[str, object] | None:
        """After a step (from 0): where a probe has just ended, decide with all ranks. What was decided, for the log."""
        start = self._trials.ended_with(step)
        if start is None:
            return None
        parts = (range(start - PROBE, start), range(start, start + PROBE))
        chosen, other = (self._trials.pooled([part])[0] for part in parts)
        way = self._decisions.at(start)
        if 0 < other < (1 - _GAIN) * chosen:
            way = not way
        from_step, before = step + 1 + UNSETTLED, self._decisions.at(step)
        if way != before:
            self._decisions.add(from_step, way)
        on, off = (chosen, other) if before else (other, chosen)
        return {
            "prioritized": way,
            "changed": way != before,
            "from_step": from_step + 1,
            "prioritized_ms": on,
            "plain_ms": off,
        }

    def state(self) -> list[list[int]]:
        """All decisions, for a checkpoint."""
        return [[step, int(way)] for step, way in self._decisions.state()]

    def load_state(self, decisions: Sequence[Sequence[int]]) -> None:
        """Take the decisions of a checkpoint over; without any, the recipe decides."""
        self._decisions.load(decisions, read=bool, subject="pipeline decisions")
