"""Errors a user can act on: what was wrong, what was got, what is allowed, what to do next."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path

# How a process ends (docs/clusters.md). 2 is a wrong command line, 130 Ctrl-C, -N or 128 + N a signal N.
EXIT_ERROR = 1
"""A problem with a message: a recipe, data, a disk, a loss that is no number."""
EXIT_UNEXPECTED = 70
"""An error nobody foresaw; its traceback is printed."""
EXIT_PREEMPTED = 75
"""Told to stop (SIGTERM), saved, ended: the same command goes on from there."""
EXIT_PEER = 76
"""Nothing wrong here: another rank failed, is gone, or has been silent for too long."""

_MOST_LETTERS = 300


class FreeScaleError(Exception):
    """A problem the user can fix; the command line prints it without a traceback and ends with its exit code.

    Args:
        what: one sentence saying what is wrong.
        got: the offending value, if there is one.
        allowed: what would have been accepted.
        next_step: the command or change that helps.
    """

    exit_code = EXIT_ERROR
    met_by: str | None = None
    """Who met it, where this rank has only heard of it."""

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


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not as it was written, or holds numbers that are none: an earlier one may still be good."""


class TrainingError(FreeScaleError):
    """Training itself cannot go on (a NaN loss, a missing device, a failed rank)."""


class PeerError(TrainingError):
    """Another rank has failed, is gone, or is silent; says which, where and why."""

    exit_code = EXIT_PEER


class Preempted(FreeScaleError):  # noqa: N818 (it is none)
    """The run was told to stop and has saved its state."""

    exit_code = EXIT_PREEMPTED


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The allowed name a misspelt one most likely meant, or None."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return matches[0] if matches else None


def in_one_line(error: BaseException) -> str:
    """Kind and text for a message of one line; of an error without a text (`assert`), where it was raised."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    if text or not frames:
        return f"{kind}: {text[:_MOST_LETTERS]}"
    place = Path(frames[-1].filename)
    return f"{kind} in {place.parent.name}/{place.name}:{frames[-1].lineno}"
