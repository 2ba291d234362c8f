"""Rules about those who listen to a run: sinks take events, a judge may end it; both change nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from freescale.check.report import CheckReport, Violation
from freescale.errors import in_one_line
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
SINK_RULE = "sinks can be written to and closed"
JUDGE_RULE = "judges decide alike and change nothing"


def check_listeners(judge: Judge | None, others: Sequence[object] = ()) -> CheckReport:
    """Whether sinks can be written to, and copies of a judge decide alike.

    Args:
        judge: if there is one; one that cannot be copied is not asked, and the report says so.
        others: sinks.
    """
    report = CheckReport((), (), ())
    if others:
        report += _tried(SINK_RULE, _of_sinks(others))
    if judge is None:
        return report
    if not callable(getattr(judge, "decide", None)):
        return report + _tried(JUDGE_RULE, [f"a judge needs decide(event); {type(judge).__name__} has none"])
    try:
        copies = copy.deepcopy(judge), copy.deepcopy(judge)
    except Exception as error:
        reason = f"{type(judge).__name__} cannot be copied ({in_one_line(error)})"
        return report + CheckReport((), (), ((JUDGE_RULE, reason),))
    return report + _tried(JUDGE_RULE, _of_judge(*copies))


def _tried(rule: str, sentences: Sequence[str]) -> CheckReport:
    return CheckReport((rule,), tuple(Violation(rule, sentence) for sentence in sentences), ())


def _of_sinks(sinks: Sequence[object]) -> list[str]:
    return [
        f"a sink needs the methods write(event) and close(); {type(sink).__name__} has no {name}"
        for sink in sinks
        for name in ("write", "close")
        if not callable(getattr(sink, name, None))
    ]


def _of_judge(one: Judge, other: Judge) -> list[str]:
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
