"""The page of a proof: what is proven first, the figures below, nothing private."""

from __future__ import annotations

from freescale.pages import Card, Row, cards, document, heading, missing, section, table
from freescale.prove.claim import NOT_PROVEN, NOT_TRIED, PROVEN
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
        section("Claims", _claims(proof), kind="panel"),
        *(_figures(each) for each in proof.claims),
    ]
    header = heading(
        brand="FreeScale proof",
        title=f"{facts.num_ranks} {kind} ranks on {machines}",
        state="all that was tried holds" if not failed else f"{failed} not proven",
        finished=not failed,
        lines=[f"{proof.date}, freescale {__version__}, {proof.seconds:.0f} s. {_SHARE}"],
        command=proof.command,
    )
    return document(
        title="FreeScale proof",
        header=header,
        body=body,
        footer="Written by freescale prove.",
    )


def _problems(proof: Proof) -> list[str]:
    return [
        f"{each.title}: {finding.what}: {finding.says}"
        for each in proof.claims
        for finding in each.findings
        if finding.status == NOT_PROVEN
    ]


def _claims(proof: Proof) -> str:
    rows = [
        Row([each.title if place == 0 else "", finding.what, finding.status, finding.says])
        for each in proof.claims
        for place, finding in enumerate(each.findings)
    ]
    return table(("claim", "looked at", "status", "figures"), rows, ends_in_words=True)


def _figures(each: Tried) -> str:
    """Tables of one claim, below each other."""
    parts = [
        f"<h3>{_escape(finding.what)}</h3>"
        + table(finding.table.names, [Row(row) for row in finding.table.rows], wraps=True)
        for finding in each.findings
        if finding.table is not None
    ]
    return section(each.title, "".join(parts), kind="panel")


def _escape(text: str) -> str:
    from html import escape

    return escape(text)
