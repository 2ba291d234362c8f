"""Errors a user can act on: what was wrong, what was got, what is allowed, what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FreeScaleError(Exception):
    """A problem the user can fix; the command line prints it without a traceback and exits with 1.

    Args:
        what: one sentence saying what is wrong.
        got: the offending value, if there is one.
        allowed: what would have been accepted.
        next_step: the command or change that helps.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        allowed: object = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.got = got
        self.allowed = allowed
        self.next_step = next_step
        lines = [what]
        if got is not None:
            lines.append(f"  got:     {got}")
        if allowed is not None:
            lines.append(f"  allowed: {allowed}")
        if next_step is not None:
            lines.append(f"  next:    {next_step}")
        super().__init__("\n".join(lines))


class ConfigError(FreeScaleError):
    """A recipe or an override is wrong."""


class DataError(FreeScaleError):
    """Input data is missing, empty or malformed."""


class PlanError(FreeScaleError):
    """No feasible assignment of samples or rows exists for the given limits."""


class CheckpointError(FreeScaleError):
    """A checkpoint cannot be written, found or trusted."""


class TrainingError(FreeScaleError):
    """Training itself cannot go on (a NaN loss, a missing device, a failed rank)."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The allowed name a misspelt one most likely meant, or None."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return matches[0] if matches else None
