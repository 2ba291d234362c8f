"""balance: with its features on, a step of these ranks has less of a bubble, and the same losses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from freescale.comm.world import Ranks
from freescale.prove.claim import (
    NOT_PROVEN,
    PROVEN,
    Evidence,
    Finding,
    Report,
    Setting,
    Table,
    evidence_of,
    needs_two,
    one_case,
)
from freescale.prove.runs import SHARES, account_of, length_of, long_tailed, train_shortly
from freescale.registry import register

_WAYS = {
    "all off": ("balance.enabled=false", "pipeline.prioritized=false"),
    "all on": ("balance.enabled=true", "pipeline.prioritized=true"),
}


@register("claim", "balance")
class LessBubble:
    """Long-tailed lengths, with balance and prioritized communication off and on, in turns."""

    title = "Balance and prioritized communication leave less of a bubble"
    order = 70
    limit_s = 420.0
    why_not = staticmethod(needs_two)
    cases = staticmethod(one_case)

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """Rounds of both ways; the first steps compile kernels and do not count."""
        steps, rounds = (16, 2) if setting.quick else (48, 3)
        steps, warm = length_of(ranks, steps)
        found: dict[str, list[Any]] = {way: [] for way in _WAYS}
        for turn in range(rounds):
            order = list(_WAYS) if turn % 2 == 0 else list(_WAYS)[::-1]
            for way in order:
                keys = (*long_tailed(ranks), *_WAYS[way], f"run.steps={steps}")
                found[way].append(account_of(train_shortly(ranks, keys).steps, warm=warm))
        return found

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """Medians of the rounds; the work that is uneven is what balance is for, so that decides."""
        seen = evidence_of(reports, "bubbles, off and on")
        if isinstance(seen, Finding):
            return [seen]
        first = seen[0]
        medians = {
            way: {key: _median(one[key] for one in rounds) for key in ("step_ms", "imbalance", *SHARES)}
            for way, rounds in first.items()
        }
        off, on = medians["all off"], medians["all on"]
        apart = max(
            abs(a - b) / abs(b)
            for a, b in zip(first["all on"][0]["losses"], first["all off"][0]["losses"], strict=True)
        )
        limit = 2e-3 if setting.device == "cpu" else 2e-2
        held = on["straggler"] < off["straggler"] and apart < limit
        rows = [
            [way, f"{one['step_ms']:.1f}", *(f"{one[key]:.1%}" for key in SHARES), f"{one['imbalance']:.2f}"]
            for way, one in medians.items()
        ]
        table = Table(("", "ms a step", *SHARES, "work of the busiest rank / mean"), rows)
        says = (
            f"waiting for the slowest rank {off['straggler']:.1%} -> {on['straggler']:.1%} of a step, bubble "
            f"{off['bubble']:.1%} -> {on['bubble']:.1%}, step {off['step_ms']:.1f} -> {on['step_ms']:.1f} ms; "
            f"losses differ by {apart:.0e} of their size"
        )
        return [
            Finding(
                "bubbles, off and on",
                PROVEN if held else NOT_PROVEN,
                says,
                {**medians, "apart": apart},
                table,
            )
        ]


def _median(values: Any) -> float:
    return float(statistics.median(values))
