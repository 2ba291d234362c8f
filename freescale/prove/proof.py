"""A proof: what was found of every claim, as an object for programs, lines for a terminal and an exit code."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from freescale.errors import EXIT_ERROR
from freescale.prove.claim import NOT_PROVEN, NOT_TRIED, PROVEN, Facts, Finding, Status, Table
from freescale.prove.privacy import scrub
from freescale.version import __version__

FORMAT = 1
MARKS = {PROVEN: "+", NOT_PROVEN: "!", NOT_TRIED: "-"}


@dataclass(frozen=True)
class Tried:
    """One claim: its findings, and how long they took."""

    name: str
    title: str
    findings: Sequence[Finding]
    seconds: float

    @property
    def status(self) -> Status:
        """Not proven if any of its findings is; not tried if all are."""
        statuses = {finding.status for finding in self.findings}
        return NOT_PROVEN if NOT_PROVEN in statuses else PROVEN if PROVEN in statuses else NOT_TRIED

    def lines(self) -> Iterator[str]:
        """For a terminal: the claim, and what was found of it."""
        yield f"{self.title}: {self.status} ({self.seconds:.0f} s)"
        for finding in self.findings:
            yield f"  {MARKS[finding.status]} {finding.what}: {finding.says}"


@dataclass(frozen=True)
class Proof:
    """What `freescale prove` has found.

    Args:
        facts: the ranks it was tried on.
        claims: in the order of the report.
        command: what was typed.
        date: when.
        seconds: how long all of it took.
        to_come: claims that have not had their turn; none in a proof that came to its end.
    """

    facts: Facts
    claims: Sequence[Tried]
    command: str = "freescale prove"
    date: str = field(default_factory=lambda: str(datetime.date.today()))
    seconds: float = 0.0
    to_come: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """0 unless a claim is not proven or had no turn; what was not tried fails nobody."""
        failed = self.to_come or any(each.status == NOT_PROVEN for each in self.claims)
        return EXIT_ERROR if failed else 0

    def count(self, status: str) -> int:
        """Findings of a status."""
        return sum(finding.status == status for each in self.claims for finding in each.findings)

    def as_json(self) -> dict[str, Any]:
        """For programs; nothing private is in it once `without_private` was called."""
        return {
            "format": FORMAT,
            "freescale": __version__,
            "date": self.date,
            "seconds": round(self.seconds, 1),
            "command": self.command,
            "facts": asdict(self.facts),
            "proven": self.count(PROVEN),
            "not_proven": self.count(NOT_PROVEN),
            "not_tried": self.count(NOT_TRIED),
            "to_come": list(self.to_come),
            "claims": [
                {
                    "name": each.name,
                    "title": each.title,
                    "status": each.status,
                    "seconds": round(each.seconds, 1),
                    "findings": [_finding_json(finding) for finding in each.findings],
                }
                for each in self.claims
            ],
        }

    def to_json(self) -> str:
        """The file."""
        return json.dumps(self.as_json(), indent=1) + "\n"

    @property
    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{self.count(status)} {status}" for status in (PROVEN, NOT_PROVEN, NOT_TRIED))
        ranks = f"{self.facts.num_ranks} {self.facts.device} ranks on {self.facts.num_machines} machine"
        return f"{counts}; {ranks}{'s' if self.facts.num_machines > 1 else ''}, {self.seconds:.0f} s"

    def without_private(self, words: Sequence[str]) -> Proof:
        """The same without names of machines, users and folders."""

        def clean(finding: Finding) -> Finding:
            table = finding.table
            if table is not None:
                table = Table(scrub(table.names, words), scrub(table.rows, words))
            return replace(
                finding,
                what=scrub(finding.what, words),
                says=scrub(finding.says, words),
                figures=scrub(dict(finding.figures), words),
                table=table,
            )

        claims = [
            replace(each, findings=[clean(finding) for finding in each.findings]) for each in self.claims
        ]
        return replace(self, claims=claims, command=scrub(self.command, words))


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "what": finding.what,
        "status": finding.status,
        "says": finding.says,
        "figures": dict(finding.figures),
    }
