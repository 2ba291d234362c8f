"""even_ranks: no rank computes slower than the others; one that does holds all of them up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from freescale.comm.world import Ranks
from freescale.profiling import Stopwatch
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
from freescale.registry import register

MOST = 1.15
"""Times the time of the middle rank: less than that is what a machine with other programs shows."""


@register("claim", "even_ranks")
class EvenRanks:
    """The same matrix products on every rank at the same time."""

    title = "All ranks compute equally fast"
    order = 60
    limit_s = 120.0
    why_not = staticmethod(needs_two)
    cases = staticmethod(one_case)

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """The fastest of many turns: what other programs take away is not this rank's speed."""
        turns = (
            100 if setting.quick else 300
        )  # of milliseconds; for tens of them a machine that is shared may be away
        return {"ms": products_ms(ranks, turns=turns)}

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """Each against the middle one; of two against the faster one."""
        seen = evidence_of(reports, "matrix products")
        if isinstance(seen, Finding):
            return [seen]
        times = [each["ms"] for each in seen]
        middle = statistics.median_low(times)
        ratios = [ms / middle for ms in times]
        slow = [rank for rank, ratio in enumerate(ratios) if ratio > MOST]
        rows = [
            [str(rank), f"{ms:.2f}", f"{ratio:.2f}"] for rank, (ms, ratio) in enumerate(zip(times, ratios))
        ]
        table = Table(("rank", "ms", "of the middle one"), rows)
        figures = {"slowest": ratios.index(max(ratios)), "slowest_ratio": max(ratios), "ms": times}
        if slow:
            named = ", ".join(f"rank {rank} takes {ratios[rank]:.2f} times as long" for rank in slow[:8])
            says = (
                f"{named} as the middle one; `balance` gives it less to do, a sound machine would give more"
            )
            return [Finding("matrix products", NOT_PROVEN, says, figures, table)]
        says = f"the slowest rank takes {max(ratios):.2f} times as long as the middle one ({MOST} allowed)"
        return [Finding("matrix products", PROVEN, says, figures, table)]


def products_ms(ranks: Ranks, *, turns: int) -> float:
    """Milliseconds of some matrix products on this rank, beside all others; a CPU counts its own core's time."""
    on_gpu = ranks.device.type == "cuda"
    size, kind = (2048, torch.bfloat16) if on_gpu else (256, torch.float32)
    if not on_gpu:
        torch.set_num_threads(1)
    left, right = (torch.ones(size, size, device=ranks.device, dtype=kind) for _ in range(2))
    watch, taken = Stopwatch(ranks.device), []
    for _ in range(turns):
        ranks.barrier()
        watch.run(lambda: multiply(left, right))
        taken.append(watch.ms)
    return min(taken[2:])


def multiply(left: torch.Tensor, right: torch.Tensor, *, times: int = 10) -> None:
    """What is timed."""
    for _ in range(times):
        torch.mm(left, right)
