"""What claims about every transport have in common: which there are, where they can run, and the one of a case."""

from __future__ import annotations

from collections.abc import Sequence

from freescale.comm import Transport
from freescale.comm.transports import find_transport_kind, make_transport
from freescale.comm.world import Ranks, gather_facts
from freescale.prove.claim import NOT_USABLE, Evidence, Facts, Setting, needs_two
from freescale.registry import names


def every_transport(facts: Facts) -> Sequence[str]:
    """For `cases`: those that ship and those of --plugin."""
    return names("transport")


def needs_gpus(facts: Facts) -> str | None:
    """For `why_not` of claims about SMs."""
    return needs_two(facts) if facts.device == "cuda" else "these ranks compute on CPUs, which have no SMs"


def open_transport(ranks: Ranks, setting: Setting, *, timeout_s: float) -> Transport | Evidence:
    """The transport of a case; or, where these ranks cannot use it, the evidence that says why."""
    assert ranks.group is not None
    problem = find_transport_kind(setting.case).why_not(gather_facts(ranks.group, ranks.device))
    if problem is not None:
        return {NOT_USABLE: problem}
    return make_transport(ranks.group, device=ranks.device, kind=setting.case, timeout_s=timeout_s)
