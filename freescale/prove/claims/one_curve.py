"""one_curve: these ranks learn what one rank learns, with everything switched on."""

from __future__ import annotations

from collections.abc import Sequence

from freescale.comm.world import Ranks
from freescale.prove.claim import (
    NOT_PROVEN,
    PROVEN,
    Evidence,
    Finding,
    Report,
    Setting,
    evidence_of,
    needs_two,
    one_case,
)
from freescale.prove.runs import SMALL, train_shortly
from freescale.registry import register

TOLERANCE = {"cpu": 1e-9, "cuda": 1e-8}
"""Of a loss, in float64: sums of other orders differ by rounding, and a GPU rounds its sums in one more place."""


@register("claim", "one_curve")
class OneCurve:
    """Losses and weights of all ranks together against one of them alone."""

    title = "One curve: these ranks learn what one rank alone learns"
    order = 30
    limit_s = 240.0

    why_not = staticmethod(needs_two)
    cases = staticmethod(one_case)

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """Train together, then rank 0 alone, on the same global batches."""
        keys = (*SMALL, f"run.steps={12 if setting.quick else 40}")
        together = train_shortly(ranks, keys, whole=True)
        evidence: Evidence = {}
        if ranks.is_first:
            alone = train_shortly(Ranks(rank=0, num_ranks=1, device=ranks.device), keys, whole=True)
            pairs = [(value, together.tensors[name]) for name, value in alone.tensors.items()]
            evidence = {
                "losses": together.steps.losses,
                "alone": alone.steps.losses,
                "tensors": len(pairs),
                "weights_apart": max(
                    float((one.double() - other.double()).abs().max()) for one, other in pairs if one.numel()
                ),
            }
        ranks.barrier()
        return evidence

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """The largest relative difference of a loss, and the largest of a weight."""
        seen = evidence_of(reports, "losses and weights")
        if isinstance(seen, Finding):
            return [seen]
        losses, alone = seen[0]["losses"], seen[0]["alone"]
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))
        weights, limit = seen[0]["weights_apart"], TOLERANCE[setting.device]
        held = apart <= limit and weights <= 10 * limit
        figures = {"steps": len(losses), "loss_apart": apart, "weights_apart": weights, "ranks": len(reports)}
        says = (
            f"{len(losses)} steps on {len(reports)} ranks in float64: losses differ from those of one rank by at most "
            f"{apart:.1e} of their size ({limit:.0e} allowed), weights by {weights:.1e}"
        )
        return [Finding("losses and weights", PROVEN if held else NOT_PROVEN, says, figures)]
