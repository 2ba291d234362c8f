"""How much of the weight gradients waits until the rows have left, decided by measuring steps of the run itself.

At fixed steps, 2 probes after those at which the way of rows is tried (`adaptive.py`), PROBE steps each postpone
everything, half of it, and nothing; then all go on with the fastest:

    chosen share ... │ everything │ half │ nothing │ chosen share ... (agree) ... the fastest
                     │ PROBE steps each, measured  │

Every share gives the same bits, so a decision moves time, never the curve. The ranks agree on the mean of their median
step times. Decisions are logged, kept in checkpoints, and off with `pipeline.decide_every=null`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from freescale.comm.world import Ranks
from freescale.errors import CheckpointError
from freescale.pipeline.prioritized.adaptive import PROBE
from freescale.pipeline.prioritized.pipeline import LOOK_AHEAD
from freescale.trace import exchange

SHARES = (1.0, 0.5, 0.0)
"""From the one a run begins with; an earlier one is kept unless a later one is faster by more than noise."""
_UNSETTLED = LOOK_AHEAD + 1
_GAIN = 0.01


class PostponeShare:
    """Which share of the weight gradients a step postpones.

    Args:
        ranks: who agrees.
        every: steps before the first trial; None: none, everything is postponed.
        hides: step -> whether its traffic is hidden; a trial in which some is not decides nothing.
    """

    def __init__(self, *, ranks: Ranks, every: int | None, hides: Callable[[int], bool]) -> None:
        self._ranks, self._hides = ranks, hides
        self._every = None if every is None else max(every, 6 * PROBE)
        self._decisions: list[tuple[int, float]] = [(0, SHARES[0])]
        self._ms: dict[int, float] = {}

    def share(self, step: int) -> float:
        """What a step (counted from 0) postpones of all it can."""
        start = self._trial_before(step)
        if start is not None and step < start + PROBE * len(SHARES):
            return SHARES[(step - start) // PROBE]
        return self._chosen(step)

    def observe(self, step: int, ms: float) -> None:
        """How long a step (from 0) took on this rank."""
        self._ms[step] = ms
        self._ms.pop(step - (len(SHARES) + 1) * PROBE, None)

    def agree(self, step: int) -> dict[str, object] | None:
        """After a step (from 0): where a trial has just ended, decide with all ranks. What was decided, for the log."""
        start = self._trial_before(step)
        if start is None or step != start + PROBE * len(SHARES) - 1 or self._ranks.control is None:
            return None
        parts = [range(start + PROBE * n, start + PROBE * (n + 1)) for n in range(len(SHARES))]
        took = self._pooled(parts)
        if not all(took) or not all(map(self._hides, range(start, step + 1))):
            return None
        best = 0
        for n in range(1, len(SHARES)):
            if took[n] < (1 - _GAIN) * took[best]:
                best = n
        from_step, before = step + 1, self._chosen(step)
        if SHARES[best] != before:
            self._decisions.append((from_step, SHARES[best]))
        return {
            "share": SHARES[best],
            "changed": SHARES[best] != before,
            "from_step": from_step + 1,
            "ms": {f"{share:g}": round(ms, 3) for share, ms in zip(SHARES, took)},
        }

    def state(self) -> list[list[float]]:
        """All decisions, for a checkpoint."""
        return [[step, share] for step, share in self._decisions]

    def load_state(self, decisions: Sequence[Sequence[float]]) -> None:
        """Take the decisions of a checkpoint over; without any, everything is postponed."""
        try:
            loaded = [(int(step), float(share)) for step, share in decisions]
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                "the checkpoint's decisions on what is postponed cannot be read", got=str(error)
            ) from None
        self._decisions = loaded or self._decisions

    def _chosen(self, step: int) -> float:
        return next(share for first, share in reversed(self._decisions) if first <= step)

    def _trial_before(self, step: int) -> int | None:
        """First step of the last trial that began at or before a step: at 1, 2, 4, 8, ... times `every`."""
        late = 2 * PROBE
        if self._every is None or step < self._every + late:
            return None
        turn = (step - late) // self._every
        return (1 << (turn.bit_length() - 1)) * self._every + late

    def _pooled(self, parts: Sequence[range]) -> list[float]:
        """Of each part the mean over the ranks of their median step time, the same bits everywhere; 0: not known."""
        mine = [[self._ms[step] for step in part[_UNSETTLED:] if step in self._ms] for part in parts]
        known = torch.tensor(
            [*(median(each) if each else 0.0 for each in mine), *(float(bool(each)) for each in mine)],
            dtype=torch.float64,
        )
        with exchange("agree on what is postponed"):
            dist.all_reduce(known, group=self._ranks.control)
            dist.broadcast(known, src=0, group=self._ranks.control)
        total, count = known.view(2, -1).tolist()
        num = self._ranks.num_ranks
        return [ms / num if int(there) == num else 0.0 for ms, there in zip(total, count)]
