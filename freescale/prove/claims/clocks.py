"""clocks: the machines agree on the time of day, so that what they log can be laid side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence

from freescale.comm.world import Ranks, SharedClock
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
from freescale.registry import register

MOST_S = 1.0
"""Apart: NTP keeps machines within milliseconds, so a second is a clock nobody sets."""


@register("claim", "clocks")
class Clocks:
    """The wall clock of every rank against that of rank 0, by questions and answers."""

    title = "The clocks of all ranks agree"
    order = 10
    limit_s = 60.0

    why_not = staticmethod(needs_two)
    cases = staticmethod(one_case)

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """Every rank as if it had a machine to itself: two on one machine may live in other time namespaces."""
        clock = SharedClock(ranks, clock=lambda: time.time(), machine=f"rank {ranks.rank}")
        return {"ahead_s": -clock.offset, "error_s": clock.error}

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """The rank that is farthest from rank 0."""
        seen = evidence_of(reports, "time of day")
        if isinstance(seen, Finding):
            return [seen]
        worst = max(range(len(seen)), key=lambda rank: abs(seen[rank]["ahead_s"]))
        ahead, error = seen[worst]["ahead_s"], max(each["error_s"] for each in seen)
        figures = {"rank": worst, "ahead_s": ahead, "error_s": error}
        if abs(ahead) > MOST_S + error:
            way = "ahead of" if ahead > 0 else "behind"
            wrong = [rank for rank, each in enumerate(seen) if abs(each["ahead_s"]) > MOST_S + error]
            says = (
                f"the clock of rank {worst} is {abs(ahead):,.1f} s {way} that of rank 0"
                f"{f', ranks {wrong} are all wrong' if len(wrong) > 1 else ''}; set it (NTP or chrony)"
            )
            return [Finding("time of day", NOT_PROVEN, says, figures)]
        says = f"no rank is farther than {1000 * abs(ahead):.1f} ms from rank 0, measured to {1000 * error:.1f} ms"
        return [Finding("time of day", PROVEN, says, figures)]
