"""The top of a run's page: when and where it ran, what was typed, which versions, how it was evaluated."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import UTC, datetime

from freescale import units
from freescale.pages.drawing import page
from freescale.trace import Event, MetricsLog, step_of
from freescale.version import __version__


def run_header(name: str, log: MetricsLog, *, going: str = "not finished") -> str:
    """Name, state and origin of a run; what its log does not say is left out. `going`: of a run without an end."""
    finished = log.end is not None
    state = str((log.end or {}).get("status", "finished")) if finished else going
    return page.heading(
        brand="FreeScale run",
        title=name,
        state=state,
        finished=finished,
        lines=[_started(log), *_resumed(log), *_protocols(log)],
        command=_origin(log.start).get("command", ""),
    )


def made_here() -> str:
    """`Made 2026-11-16 18:41 UTC on host, freescale 0.1.0`: of pages that are not about one run."""
    return f"Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {socket.gethostname()}, freescale {__version__}"


def written(event: Event) -> str:
    """When an event was written, in the one time zone everybody can convert from."""
    seconds = units.number(event.get("time"))
    if seconds is None:
        return ""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):  # a number that is no date
        return ""


def origin_text(event: Event) -> str:
    """`on host, freescale 0.1.0, torch 2.13`, as far as the event says."""
    origin = _origin(event)
    versions = [f"{name} {origin[name]}" for name in ("freescale", "torch", "python") if name in origin]
    return ", ".join([f"on {origin['host']}", *versions] if "host" in origin else versions)


def _started(log: MetricsLog) -> str:
    when, where = written(log.start), origin_text(log.start)
    return " ".join(filter(None, [f"Started {when}" if when else "", where]))


def _resumed(log: MetricsLog) -> list[str]:
    """One line for all later starts; another machine or version is named."""
    if not log.resumes:
        return []
    last = log.resumes[-1]
    times = "" if len(log.resumes) == 1 else f" the last of {len(log.resumes)} times,"
    where = origin_text(last)
    elsewhere = f" {where}" if where != origin_text(log.start) else ""
    when = written(last)
    return [f"Resumed{times} after step {step_of(last) or 0:,}{f', {when}' if when else ''}{elsewhere}"]


def _protocols(log: MetricsLog) -> list[str]:
    """By which validation targets were judged, and test targets where it was by another one: of all users, say."""
    valid, test = (
        (event or {}).get("protocol") for event in (log.evals[-1] if log.evals else None, log.test)
    )
    said = {"Evaluation": valid or test, "Test": test if valid and test != valid else None}
    return [f"{name}: {protocol}" for name, protocol in said.items() if protocol]


def _origin(event: Event) -> dict[str, str]:
    origin = event.get("origin")
    return {str(key): str(value) for key, value in origin.items()} if isinstance(origin, Mapping) else {}
