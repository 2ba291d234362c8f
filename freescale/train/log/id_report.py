"""What a run tells about its id map: counts with every step, the whole picture at every evaluation and checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from freescale.balance import StepPlan
from freescale.comm.world import Ranks, gather
from freescale.embedding import COUNTS, MOST_TOLD, IdMap, advice, gather_ids, learns_ids, merged
from freescale.pipeline import TABLE, ReadyBatch
from freescale.trace import IDS_OF


def id_reports(id_maps: Mapping[str, IdMap], ranks: Ranks) -> list[IdReport]:
    """One for every table; that of items is called as if there were no other."""
    return [IdReport(id_map, ranks, table="" if name == TABLE else name) for name, id_map in id_maps.items()]


class IdReport:
    """Adds up what happened to ids over the ranks. Implements StepExtension; ids that are a formula say nothing.

    Args:
        id_map: raw ids to rows.
        ranks: who holds parts of it.
        table: whose map it is, where there are several.
    """

    acts = False

    def __init__(self, id_map: IdMap, ranks: Ranks, *, table: str = "") -> None:
        self.name = IDS_OF + table if table else "ids"
        self._prefix = f"{table}_" if table else ""
        self._section = f"tables.{table}" if table else "embedding"
        self._map = id_map
        self._ids = id_map if learns_ids(id_map) else None
        self._ranks = ranks
        self._totals = dict.fromkeys(COUNTS, 0)
        self._warned = False

    def begin(self, ready: ReadyBatch) -> None:
        """Nothing: the ids of a batch have become rows before its step begins."""

    def counts(self, step: int) -> Tensor:
        """This rank's numbers of a step, to be summed over the ranks with its loss; may be empty."""
        if self._ids is None:
            return torch.zeros(0, dtype=torch.float64)
        return self._ids.take_counts(step)

    def check(self, counts: Tensor) -> None:
        """Nothing: ids do not spoil a loss."""

    def fields(self, summed: Tensor, plan: StepPlan) -> dict[str, float]:
        """Fields of the step event from the sum over all ranks; counts are distinct ids of the global batch."""
        if self._ids is None:
            return {}
        *counts, occupied = (int(value) for value in summed.tolist())
        named = dict(zip(COUNTS, counts))
        for name, count in named.items():
            self._totals[name] += count
        return {f"{self._prefix}id_{name}": count for name, count in named.items()} | {
            f"{self._prefix}id_occupancy": occupied / self._ids.num_slots
        }

    def picture(self) -> dict[str, Any] | None:
        """Counts since the last picture, occupancy, histograms, evicted ids; the same on every rank."""
        if self._ids is None:
            return None
        evicted = gather_ids(self._ids.take_evicted(), self._ranks.control)
        stats = self._ids.stats()
        histograms = {name: stats.get(name, {}) for name in ("probe_histogram", "age_histogram")}
        untold = stats.get("evicted_left_out", 0)
        mine = {"occupied": stats["occupied"], "left_out": untold, **histograms}
        parts = gather(mine, group=self._ranks.control, what="gather id maps")
        occupancy = sum(part["occupied"] for part in parts) / self._ids.num_slots
        counts, self._totals = self._totals, dict.fromkeys(COUNTS, 0)
        left_out = sum(part["left_out"] for part in parts) + max(0, len(evicted) - MOST_TOLD)
        return {
            "slots": self._ids.num_slots,
            "occupancy": occupancy,
            **counts,
            "probe_histogram": merged([part["probe_histogram"] for part in parts]),
            "age_histogram": merged([part["age_histogram"] for part in parts]),
            "evicted_ids": evicted[:MOST_TOLD].tolist(),
            "evicted_left_out": left_out,
            "warning": self._warning(occupancy, counts),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The map itself."""
        return self._map.state_dict()

    def restored(self) -> None:
        """The map was filled from a checkpoint."""
        self._map.restored()

    def _warning(self, occupancy: float, counts: dict[str, int]) -> str | None:
        """Said once a run."""
        text = advice(occupancy=occupancy, counts=counts, section=self._section) if not self._warned else None
        self._warned |= text is not None
        return text
