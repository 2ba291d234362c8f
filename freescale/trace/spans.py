"""Where a rank is in the story of its run: the stage and the step, for errors that name both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Here(threading.local):
    """Where this thread is."""

    stage = "start"
    step: int | None = None


_here = _Here()
_failed: dict[str, Any] = {"error": None}


@contextmanager
def stage(name: str, *, step: int | None = None) -> Iterator[None]:
    """Mark the code inside as a named stage of a step; the innermost stage of an error is kept, to be told."""
    before = _here.stage
    _here.stage = name
    if step is not None:
        _here.step = step
    try:
        yield
    except BaseException as error:
        if _failed["error"] is not error:
            _failed.update(error=error, stage=name, step=_here.step)
        raise
    _here.stage = before


def current_stage() -> tuple[str, int | None]:
    """The stage and step this thread is in, or those in which the failure began."""
    if _failed["error"] is not None:
        return str(_failed["stage"]), _failed["step"]
    return _here.stage, _here.step
