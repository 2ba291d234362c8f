"""killed_rank: a rank that is killed in the middle of a training is named by all others, soon."""

from __future__ import annotations

import os
import re
import signal
import time
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
    cause_of,
    needs_two,
    one_case,
)
from freescale.prove.runs import SMALL, train_shortly
from freescale.registry import register

DIES_AT = 6
MOST_S = 10.0
"""From the last thing a rank heard of the others until it knows who is gone."""


@register("claim", "killed_rank")
class KilledRank:
    """The last rank kills itself with SIGKILL before a step; nobody is told."""

    title = "A killed rank is named by all others within 10 s"
    order = 80
    limit_s = 120.0
    why_not = staticmethod(needs_two)
    cases = staticmethod(one_case)

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """Ranks that live on raise what they heard; how long it took goes with it."""
        last = [time.monotonic()]

        def before_step(step: int) -> None:
            last[0] = time.monotonic()
            if step == DIES_AT and ranks.rank == ranks.num_ranks - 1:
                if ranks.device.type == "cuda":
                    # A client of MPS that ends with work under way may take the server, and so the others, with it.
                    torch.cuda.synchronize()
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            train_shortly(ranks, (*SMALL, "run.steps=40"), before_step=before_step)
        except BaseException as error:
            heard = ranks.watch.failed(error)
            return {"heard": f"{type(heard).__name__}: {heard}", "seconds": time.monotonic() - last[0]}
        return {"heard": "", "seconds": 0.0}

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """Who said what: a rank may end with a message instead of evidence."""
        victim = len(reports) - 1
        if (reports[victim].exit_code or 0) != -signal.SIGKILL:
            said = reports[victim].error.strip()[-300:] or "no word"
            return [Finding("SIGKILL", NOT_PROVEN, f"rank {victim} was to be killed and was not: {said}")]
        if any(report.timed_out for report in reports[:victim]):
            return [
                Finding("SIGKILL", NOT_PROVEN, f"rank {victim} was killed, and {cause_of(reports[:victim])}")
            ]
        told: dict[int, float] = {}
        silent: list[int] = []
        for report in reports[:victim]:
            heard = (report.evidence or {}).get("heard") or report.error
            if re.search(rf"\brank {victim}\b|\branks \[{victim}\]", heard):
                # One that was ended by its watch has no evidence: so long its process outlived the killed one's.
                outlived = max(0.0, report.seconds - reports[victim].seconds)
                told[report.rank] = float((report.evidence or {}).get("seconds", outlived))
            else:
                silent.append(report.rank)
        longest = max(told.values(), default=0.0)
        figures = {"killed": victim, "named_by": len(told), "of": victim, "seconds": longest}
        if silent:
            first = reports[silent[0]]
            heard = (first.evidence or {}).get("heard") or first.error or "nothing"
            says = f"rank {victim} was killed, and ranks {silent} did not name it: {heard.strip()[-300:]}"
            return [Finding("SIGKILL", NOT_PROVEN, says, figures)]
        who = "the other named it" if victim == 1 else f"all {victim} others named it, the last"
        says = f"rank {victim} was killed in a training; {who} after {longest:.1f} s"
        return [Finding("SIGKILL", PROVEN if longest <= MOST_S else NOT_PROVEN, says, figures)]
