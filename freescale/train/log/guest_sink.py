"""A sink that somebody else has written: whatever it does, the run goes on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

from freescale.errors import in_one_line
from freescale.train.log.events import MetricSink


class GuestSink:
    """Hands events on to a sink; once that fails it is told of and left alone.

    Args:
        sink: gets copies of the events, so that it can change nothing of what others are given.
        tell: (step, text) -> where a failure is told.
    """

    def __init__(self, sink: MetricSink, *, tell: Callable[[int, str], None]) -> None:
        self._sink: MetricSink | None = sink
        self._tell = tell

    def write(self, event: dict[str, object]) -> None:
        """Hand one event on."""
        if self._sink is None:
            return
        try:
            self._sink.write(copy.deepcopy(event))
        except Exception as error:
            failed, self._sink = type(self._sink).__name__, None
            step = event.get("step")
            self._tell(
                step if isinstance(step, int) else 0,
                f"the sink {failed} failed and gets no more events: {in_one_line(error)}",
            )

    def close(self) -> None:
        """Close it, if it still listens."""
        sink, self._sink = self._sink, None
        if sink is not None:
            with contextlib.suppress(Exception):
                sink.close()
