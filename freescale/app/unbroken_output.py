"""Output that nobody reads any more ends no training: `freescale train ... | tee log`, and tee is gone first.

A scheduler that ends a job tells all of its processes at once. The reader of a pipe ends then; a line about the very
checkpoint that is being saved would fail, and the save with it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast


@contextlib.contextmanager
def unbroken_output() -> Iterator[None]:
    """Standard output and error whose reader may go away; what is written from then on goes nowhere."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Unbroken(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Unbroken:
    """A stream, but for a broken pipe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._survive(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._survive(self._stream.flush)

    def _survive(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # and what is left in its buffer
            os.close(nowhere)
