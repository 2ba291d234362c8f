"""Rules about those who listen to a run: sinks take events, a judge may end it; both change nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from freescale.check.report import CheckReport, Violation
from freescale.train import Judge

_EVENT = {
    "event": "eval",
    "step": 1,
    "split": "valid",
    "hr@10": 0.1,
    "ndcg@10": 0.05,
    "mrr": 0.04,
    "protocol": "a rehearsal",
    "time": 0.0,
}
RULE = "sinks and judges change nothing"


def check_listeners(judge: Judge | None, others: Sequence[object] = ()) -> CheckReport:
    """Whether copies of a judge decide alike, and have the methods they need.

    Args:
        judge: if there is one; it is copied where it can be, and not asked where it cannot.
        others: sinks.
    """
    found = [
        f"a sink needs the methods write(event) and close(); {type(sink).__name__} has no {name}"
        for sink in others
        for name in ("write", "close")
        if not callable(getattr(sink, name, None))
    ]
    if judge is not None:
        found += _of_judge(judge)
    if judge is None and not others:
        return CheckReport()
    return CheckReport((RULE,), tuple(Violation(RULE, sentence) for sentence in found))


def _of_judge(judge: Judge) -> list[str]:
    if not callable(getattr(judge, "decide", None)):
        return [f"a judge needs the method decide(event); {type(judge).__name__} has none"]
    try:
        one, other = copy.deepcopy(judge), copy.deepcopy(judge)
    except Exception:
        return []
    event, same = dict(_EVENT), dict(_EVENT)
    answers = [one.decide(event), other.decide(same)]
    if event != _EVENT or same != _EVENT:
        return ["a judge changes the event that it is given: sinks are given the same one"]
    if any(not isinstance(answer, str | None) for answer in answers):
        return [f"decide returned {answers[0]!r}: return the reason to stop as text, or None"]
    if answers[0] != answers[1]:
        return [
            "two copies of your judge decide otherwise on the same evaluation: a resumed run may stop elsewhere"
        ]
    return []
