"""The page of a proof: what is proven first, the figures below, nothing private."""

from __future__ import annotations

from html import escape

from freescale.pages import Card, Row, cards, document, heading, missing, section, table
from freescale.prove.claim import NOT_PROVEN, NOT_TRIED, PROVEN, Finding
from freescale.prove.proof import Proof, Tried
from freescale.version import __version__

_SHARE = (
    "This page holds no names of machines, users or folders. If you can, add it with its JSON file to docs/proofs "
    "by a pull request: nobody here has as many GPUs as you."
)


def render(proof: Proof) -> str:
    """The whole file."""
    failed = proof.count(NOT_PROVEN)
    facts = proof.facts
    kind = "GPU" if facts.device == "cuda" else "CPU"
    machines = f"{facts.num_machines} machine{'s' if facts.num_machines > 1 else ''}"
    body = [
        cards(
            [
                Card("Proven", str(proof.count(PROVEN)), "shown by running it here"),
                Card("Not proven", str(failed), "tried, and it did not hold" if failed else "nothing failed"),
                Card("Not tried", str(proof.count(NOT_TRIED)), "needs other hardware, or more time"),
                Card("Ranks", str(facts.num_ranks), f"{kind}, {machines}"),
            ]
        ),
        missing(_problems(proof), title="Not proven"),
        missing(
            [", ".join(proof.to_come)] if proof.to_come else [], title="Ended before these had their turn"
        ),
        section("Claims", "".join(_claim(each) for each in proof.claims), kind="facts claims"),
    ]
    header = heading(
        brand="FreeScale proof",
        title=f"{facts.num_ranks} {kind} ranks on {machines}",
        state=_state(proof),
        finished=not proof.exit_code,
        lines=[f"{proof.date}, freescale {__version__}, {proof.seconds:.0f} s. {_SHARE}"],
        command=proof.command,
    )
    return document(
        title="FreeScale proof",
        header=header,
        body=body,
        footer="Written by freescale prove.",
    )


def _state(proof: Proof) -> str:
    failed = proof.count(NOT_PROVEN)
    if failed:
        return f"{failed} not proven"
    return f"not finished: {len(proof.to_come)} to come" if proof.to_come else "all that was tried holds"


def _problems(proof: Proof) -> list[str]:
    return [
        f"{each.title}: {finding.what}: {finding.says}"
        for each in proof.claims
        for finding in each.findings
        if finding.status == NOT_PROVEN
    ]


def _claim(each: Tried) -> str:
    """One panel: the claim, its status, a line for each finding, and tables below."""
    kind = {PROVEN: "", NOT_PROVEN: " open"}.get(each.status, " none")
    mark = f'<span class="state{kind}">{escape(each.status)}</span>'
    lines = "".join(
        f"<dt>{escape(finding.what)}</dt><dd>{escape(_told(finding, each))}</dd>" for finding in each.findings
    )
    tables = "".join(
        f'<p class="note">{escape(finding.what)}</p>'
        + table(finding.table.names, [Row(row) for row in finding.table.rows], wraps=True)
        for finding in each.findings
        if finding.table is not None
    )
    return f'<div class="panel"><h3>{escape(each.title)} {mark}</h3><dl>{lines}</dl>{tables}</div>'


def _told(finding: Finding, each: Tried) -> str:
    """Its sentence, with its status where that is not the claim's own."""
    return finding.says if finding.status == each.status else f"{finding.status}: {finding.says}"
