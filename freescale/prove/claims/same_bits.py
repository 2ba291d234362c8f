"""same_bits: prioritized communication ends with the bits of the plain path."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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


@register("claim", "same_bits")
class SameBits:
    """The same ranks, the same recipe, with and without prioritized communication."""

    title = "Prioritized communication learns what the plain path learns, bit for bit"
    order = 40
    limit_s = 240.0

    why_not = staticmethod(needs_two)
    cases = staticmethod(one_case)

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """Each rank compares its own part of every tensor."""
        keys = (*SMALL, f"run.steps={12 if setting.quick else 60}", "pipeline.decide_every=null")
        plain, prioritized = (
            train_shortly(ranks, (*keys, f"pipeline.prioritized={way}")) for way in ("false", "true")
        )
        differing = [
            name for name, value in plain.tensors.items() if not torch.equal(value, prioritized.tensors[name])
        ]
        return {
            "differing": differing,
            "tensors": len(plain.tensors),
            "losses_equal": plain.steps.losses == prioritized.steps.losses,
            "steps": len(plain.steps.events),
        }

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """Every rank, every tensor."""
        seen = evidence_of(reports, "weights and optimizer states")
        if isinstance(seen, Finding):
            return [seen]
        wrong = {rank: each["differing"] for rank, each in enumerate(seen) if each["differing"]}
        held = not wrong and all(each["losses_equal"] for each in seen)
        figures = {
            "ranks": len(seen),
            "tensors": seen[0]["tensors"],
            "differing": sum(map(len, wrong.values())),
        }
        if held:
            says = f"{seen[0]['tensors']} tensors of {len(seen)} ranks are equal to the last bit"
        else:
            rank, names = next(iter(wrong.items()), (0, ["the losses"]))
            says = (
                f"on {len(wrong)} of {len(seen)} ranks tensors differ, on rank {rank}: {', '.join(names[:3])}"
            )
        return [Finding("weights and optimizer states", PROVEN if held else NOT_PROVEN, says, figures)]
