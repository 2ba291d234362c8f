"""What `freescale prove` does on each rank: try one claim after the other, gather, and let rank 0 write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freescale.comm.world import Membership, Ranks, gather, join_ranks, own_membership, pick_device
from freescale.errors import ConfigError, nearest
from freescale.pages import replace_file
from freescale.prove.claim import NOT_PROVEN, NOT_TRIED, Claim, Facts, Finding, Setting
from freescale.prove.page import render
from freescale.prove.privacy import private_words
from freescale.prove.proof import Proof, Tried
from freescale.prove.worlds import try_case
from freescale.registry import find, names

PAGE, DATA = "proof.html", "proof.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What was asked for.

    Args:
        out: where page and data go, and what claims write meanwhile.
        quick: leave out what takes minutes.
        device: auto, cpu or cuda.
        only: names of claims, or CLAIM:CASE; all unless given.
        plugins: modules with claims and transports of one's own.
        command: what was typed.
    """

    out: Path
    quick: bool = False
    device: str = "auto"
    only: Sequence[str] = ()
    plugins: Sequence[str] = ()
    command: str = "freescale prove"


def prove(wanted: Wanted, *, say: Say = lambda text: None) -> Proof | None:
    """Try the claims on the ranks this process is one of; the proof on rank 0, None elsewhere."""
    claims = chosen(wanted.only)
    with join_ranks(device="cpu", timeout_s=1800.0) as ranks:
        who = own_membership()
        facts = _facts(wanted, ranks)
        mine = [*private_words(), str(wanted.out), str(wanted.out.absolute())]
        words = gather(mine, group=ranks.control)
        private = [word for each in words for word in each]
        began, proof = time.monotonic(), None
        tried: list[Tried] = []
        for name, claim in claims:
            found = _try(name, claim, facts, wanted, ranks, who)
            tried.append(found)
            if ranks.is_first:
                # After every claim: who ends it early keeps what was found by then.
                to_come = [other for other, _ in claims[len(tried) :]]
                seconds = time.monotonic() - began
                proof = Proof(facts, tried, wanted.command, seconds=seconds, to_come=to_come)
                proof = proof.without_private(private)
                _write(proof, wanted.out)
                for line in proof.claims[-1].lines():
                    say(line)
        return proof


def _write(proof: Proof, out: Path) -> None:
    """The page, and the same for programs."""
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / DATA, proof.to_json())
    replace_file(out / PAGE, render(proof))


def chosen(only: Sequence[str]) -> list[tuple[str, Claim]]:
    """The claims to try, in the order of the report.

    Raises:
        ConfigError: there is no claim of a name.
    """
    known = names("claim")
    wanted = [each.partition(":")[0] for each in only]
    for name in wanted:
        if name not in known:
            close = nearest(name, known)
            raise ConfigError(
                f"--only: there is no claim {name!r}",
                allowed=", ".join(known),
                next_step=f"did you mean {close!r}?" if close else None,
            )
    found = [(name, find("claim", name).make) for name in known if not only or name in wanted]
    return sorted(found, key=lambda each: each[1].order)


def _try(name: str, claim: Claim, facts: Facts, wanted: Wanted, ranks: Ranks, who: Membership) -> Tried:
    """All cases of one claim."""
    began, findings = time.monotonic(), []
    problem = claim.why_not(facts)
    if problem is not None:
        return Tried(name, claim.title, [Finding("all", NOT_TRIED, problem)], 0.0)
    for case in _cases(name, claim, facts, wanted.only):
        setting = Setting(wanted.out.absolute(), wanted.quick, case, facts.device)
        reports = try_case(
            ranks,
            who,
            name,
            setting,
            limit_s=claim.limit_s,
            plugins=wanted.plugins,
            variables=getattr(claim, "environment", None),
        )
        if ranks.is_first:
            findings += _judged(claim, reports, setting)
    return Tried(name, claim.title, findings, time.monotonic() - began)


def _cases(name: str, claim: Claim, facts: Facts, only: Sequence[str]) -> Sequence[str]:
    """All cases of a claim, or the one that was asked for as CLAIM:CASE."""
    there = claim.cases(facts)
    asked = [case for each, _, case in (one.partition(":") for one in only) if each == name and case]
    unknown = [case for case in asked if case not in there]
    if unknown:
        raise ConfigError(f"--only: {name} has no case {unknown[0]!r}", allowed=", ".join(there))
    return [case for case in there if not asked or case in asked]


def _judged(claim: Claim, reports: Any, setting: Setting) -> list[Finding]:
    """The claim's own judgement; evidence it cannot read proves nothing."""
    try:
        return claim.judge(reports, setting)
    except Exception as error:
        says = f"its evidence cannot be judged: {type(error).__name__}: {error}"
        return [Finding(setting.case or "evidence", NOT_PROVEN, says)]


def _facts(wanted: Wanted, ranks: Ranks) -> Facts:
    """Of all ranks; the device as rank 0 sees it."""
    from freescale.comm.world import own_facts

    device = pick_device(wanted.device).type
    mine = (device, own_facts(ranks.device).machine)
    seen = gather(mine, group=ranks.control)
    machines = len({machine for _, machine in seen})
    return Facts(seen[0][0], ranks.num_ranks, machines, wanted.quick)
