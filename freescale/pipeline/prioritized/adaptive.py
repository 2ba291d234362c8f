"""Whether hiding the traffic pays, decided by measuring both ways in the run itself.

At fixed steps, 1, 2, 4, 8, ... times `every`, a few steps go the other way than the rest:

    chosen way ... chosen way │ other way, PROBE steps │ chosen way ... (agree) ... the faster way
                   measured   │ measured               │

The two ways give the same bits, so a decision moves time, never the curve. Which way a step goes is a function of the
step and of what the ranks agreed on earlier; they agree on the mean of their median step times. Decisions are logged,
kept in checkpoints, and off with `pipeline.decide_every=null`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from freescale.comm.world import Ranks
from freescale.errors import CheckpointError
from freescale.pipeline.prioritized.pipeline import LOOK_AHEAD
from freescale.trace import exchange

PROBE = 10
# The first steps after a change are neither one way nor the other.
_UNSETTLED = LOOK_AHEAD + 1
# Less than this is noise, and a change for nothing would be made again and again.
_GAIN = 0.02
_LONGEST_GAP = 64


class Switch:
    """Which steps send their ids ahead.

    Args:
        on: the way the run begins with.
        ranks: who agrees.
        every: steps before the first probe; None: no probe, the way is fixed.
    """

    def __init__(self, *, on: bool, ranks: Ranks, every: int | None) -> None:
        self._ranks = ranks
        self._every = None if every is None else max(every, 3 * PROBE)
        self._decisions: list[tuple[int, bool]] = [(0, on)]
        self._ms: dict[int, float] = {}

    def prioritized(self, step: int) -> bool:
        """Whether a step (counted from 0) goes the prioritized way."""
        start = self._probe_before(step)
        probing = start is not None and step < start + PROBE
        return self._chosen(step) != probing

    def observe(self, step: int, ms: float) -> None:
        """How long a step (from 0) took on this rank."""
        self._ms[step] = ms
        self._ms.pop(step - 4 * PROBE, None)

    def agree(self, step: int) -> dict[str, object] | None:
        """After a step (from 0): where a probe has just ended, decide with all ranks. What was decided, for the log."""
        start = self._probe_before(step)
        if start is None or step != start + PROBE - 1 or self._ranks.control is None:
            return None
        chosen, other = self._pooled(range(start - PROBE, start)), self._pooled(range(start, start + PROBE))
        way = self._chosen(start)
        if 0 < other < (1 - _GAIN) * chosen:
            way = not way
        from_step = step + 1 + _UNSETTLED
        changed = way != self._chosen(step)
        if changed:
            self._decisions.append((from_step, way))
        on, off = (chosen, other) if self._chosen(step) else (other, chosen)
        return {
            "prioritized": way,
            "changed": changed,
            "from_step": from_step + 1,
            "prioritized_ms": on,
            "plain_ms": off,
        }

    def state(self) -> list[list[int]]:
        """All decisions, for a checkpoint."""
        return [[step, int(way)] for step, way in self._decisions]

    def load_state(self, decisions: Sequence[Sequence[int]]) -> None:
        """Take the decisions of a checkpoint over; without any, the recipe decides."""
        try:
            loaded = [(int(step), bool(way)) for step, way in decisions]
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                "the checkpoint's pipeline decisions cannot be read", got=str(error)
            ) from None
        self._decisions = loaded or self._decisions

    def _chosen(self, step: int) -> bool:
        return next(way for first, way in reversed(self._decisions) if first <= step)

    def _probe_before(self, step: int) -> int | None:
        """First step of the last probe that began at or before a step."""
        if self._every is None or step < self._every:
            return None
        turn = step // self._every
        if turn >= _LONGEST_GAP:
            return turn // _LONGEST_GAP * _LONGEST_GAP * self._every
        return (1 << (turn.bit_length() - 1)) * self._every

    def _pooled(self, steps: range) -> float:
        """Mean over the ranks of their median step time, the same bits on every rank; 0 where one has none."""
        mine = [self._ms[step] for step in steps[_UNSETTLED:] if step in self._ms]
        known = torch.tensor([median(mine) if mine else 0.0, float(bool(mine))], dtype=torch.float64)
        with exchange("agree on the way"):
            dist.all_reduce(known, group=self._ranks.control)
            dist.broadcast(known, src=0, group=self._ranks.control)
        complete = int(known[1]) == self._ranks.num_ranks
        return float(known[0]) / self._ranks.num_ranks if complete else 0.0
