"""What was checked, and what was found: one sentence a violation, which names the rule and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from freescale.errors import ConfigError


@dataclass(frozen=True)
class Violation:
    """One way in which code leaves the one curve.

    Args:
        rule: its name.
        sentence: what the code does, and what to do instead.
    """

    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.sentence}"


@dataclass(frozen=True)
class CheckReport:
    """The rules that were tried, and those that do not hold.

    Args:
        rules: tried, in their order.
        violations: found.
        skipped: rules that could not be tried, each with the reason.
    """

    rules: tuple[str, ...] = ()
    violations: tuple[Violation, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every rule that was tried holds."""
        return not self.violations

    def __add__(self, other: CheckReport) -> CheckReport:
        return CheckReport(
            self.rules + other.rules, self.violations + other.violations, self.skipped + other.skipped
        )

    def __str__(self) -> str:
        """One line a rule; below a rule that does not hold, what was found."""
        lines = []
        for rule in self.rules:
            found = [violation.sentence for violation in self.violations if violation.rule == rule]
            lines.append(f"{'NO ' if found else 'yes'}  {rule}")
            lines += [f"       {sentence}" for sentence in found]
        lines += [f" -   {rule}: not tried, {reason}" for rule, reason in self.skipped]
        return "\n".join(lines)

    def facts(self) -> dict[str, Any]:
        """As a run's folder and an export keep it."""
        return {
            "on_the_one_curve": self.ok,
            "rules": list(self.rules),
            "violations": [str(violation) for violation in self.violations],
            "not_tried": [f"{rule}: {reason}" for rule, reason in self.skipped],
        }


def judge_report(report: CheckReport, *, on_violation: Literal["stop", "warn"]) -> list[str]:
    """What to tell about a report: nothing if all is well.

    Raises:
        ConfigError: something was found, and the recipe does not say `run.check=warn`.
    """
    if report.ok:
        return []
    if on_violation == "stop":
        raise ConfigError(
            f"your code does not keep the one curve:\n  - {_listed(report.violations)}",
            next_step="mend it, or train on with run.check=warn: run, report and export are then marked",
        )
    return [f"NOT on the one curve: {violation}" for violation in report.violations]


def _listed(violations: Sequence[Violation]) -> str:
    return "\n  - ".join(str(violation) for violation in violations)
