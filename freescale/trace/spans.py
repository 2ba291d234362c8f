"""Where a rank is in the story of its run: the stage and the step, for errors that name both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_current: dict[str, object] = {"stage": "start", "step": None}


@contextmanager
def stage(name: str, *, step: int | None = None) -> Iterator[None]:
    """Mark the code inside as a named stage of a step; on an error the mark stays, so that it can be told."""
    before = dict(_current)
    _current["stage"] = name
    if step is not None:
        _current["step"] = step
    yield
    _current.update(before)
    if step is not None:
        _current["step"] = step


def current_stage() -> tuple[str, int | None]:
    """The stage and step this process is in, or was in when it failed."""
    step = _current["step"]
    return str(_current["stage"]), step if isinstance(step, int) else None
