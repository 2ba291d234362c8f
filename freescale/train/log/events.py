"""A run's events, and what takes them; `sinks.py` has the files that keep them.

An event is a dictionary with a kind: `resume`, `start`, `step`, `eval`, `balance`, `pipeline`, `ranks`, `checkpoint`,
`notice`, `stopped`, `end`, or the name of an extension of the run (`ids`, `experts`). `Progress` makes the events and
hands each to every sink; ranks that should stay silent are given no sinks. Steps are handed in when their time is
accounted for, some steps later; a `tick` tells those who watch that the run moves.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from freescale.trace import POPULARITY, REPEAT, Event, Parts, slowest, total

Facts = Mapping[str, Mapping[str, object]]
"""What a run is, as section -> name -> value."""


_MOST_UNTOLD = 100
_PLAIN = (float, int, str, bool, type(None))


class MetricSink(Protocol):
    """Anything that takes a run's events."""

    def write(self, event: dict[str, object]) -> None:
        """Take one event; the caller does not change it afterwards."""

    def close(self) -> None:
        """Write out what is held back; no event follows."""


@runtime_checkable
class LiveSink(Protocol):
    """A sink for people who watch."""

    def tick(self, event: dict[str, object]) -> None:
        """A step is done; its whole event comes later."""


class Progress:
    """Makes the events of a run and hands each of them to every sink.

    Sinks are opened when a run has been built. What was to be noticed before that is kept for `untold`.
    """

    def __init__(self, sinks: Sequence[MetricSink] = ()) -> None:
        self._sinks = list(sinks)
        self._untold: deque[str] = deque(maxlen=_MOST_UNTOLD)

    def add(self, sink: MetricSink) -> None:
        """Hand the events from now on to one more sink."""
        self._sinks.append(sink)

    def resume(self, step: int, message: str, **others: object) -> None:
        """The run goes on after this step: from where and what has changed since."""
        self._write({"event": "resume", "step": step, "message": message, **others})

    def start(self, facts: Facts, **others: object) -> None:
        """What the run is: data set, model, plan, as section -> name -> value."""
        self._write({"event": "start", **others, "facts": {name: dict(rows) for name, rows in facts.items()}})

    def step(
        self,
        step: int,
        *,
        loss: float | None,
        step_ms: float | None,
        tokens_per_s: float | None,
        bubble: float | None = None,
        straggler: float | None = None,
        comm: float | None = None,
        host: float | None = None,
        imbalance: float | None = None,
        **others: object,
    ) -> None:
        """One optimizer step; shares are fractions of the step time, None where nothing was measured."""
        timing = {"loss": loss, "step_ms": step_ms, "tokens_per_s": tokens_per_s}
        bubbles = {"bubble": bubble, "straggler": straggler, "comm": comm, "host": host}
        self._write({"event": "step", "step": step, **timing, **bubbles, "imbalance": imbalance, **others})

    def tick(self, step: int, **others: object) -> None:
        """A step is done, for those who watch; files keep its `step` event, which comes later."""
        event = {"event": "tick", "step": step, **others}
        for sink in self._sinks:
            if isinstance(sink, LiveSink):
                sink.tick(event)

    def ranks(self, step: int, totals: Sequence[Parts], *, clock_error: float | None = None) -> None:
        """Where the time of every rank went, from the run's second step to this one; seconds by rank.

        Between machines: by how many seconds their clocks may be apart, and so straggler and comm, at most.
        """
        self._write(
            {
                "event": "ranks",
                "step": step,
                **{
                    name: [round(float(getattr(one, name)), 6) for one in totals]
                    for name in ("total", "compute", "straggler", "comm", "host")
                },
                **({} if clock_error is None else {"clock_error": clock_error}),
            }
        )

    def evaluation(
        self,
        step: int,
        metrics: Mapping[str, float | None],
        *,
        popularity: Mapping[str, float] | None = None,
        repeat: Mapping[str, float] | None = None,
        protocol: str = "",
        **others: object,
    ) -> None:
        """Metrics after a step, and how they were measured.

        Beside them those of recommending what is popular, and a user's own items again.
        """
        baseline = {POPULARITY + name: value for name, value in (popularity or {}).items()}
        baseline |= {REPEAT + name: value for name, value in (repeat or {}).items()}
        self._write({"event": "eval", "step": step, **metrics, **baseline, "protocol": protocol, **others})

    def grown(self, step: int, *, total_steps: int) -> None:
        """The data of a run have grown: it has more steps now."""
        self._write({"event": "grown", "step": step, "total_steps": total_steps})

    def window(self, step: int, facts: Mapping[str, object]) -> None:
        """A window of a log that is learnt after this step."""
        self._write({"event": "window", "step": step, **facts})

    def balance(self, step: int, decided: Mapping[str, object]) -> None:
        """What the ranks agreed on: cost model, its error, rank speeds, and from which step on."""
        self._write({"event": "balance", "step": step, **decided})

    def pipeline(self, step: int, decided: Mapping[str, object]) -> None:
        """Which way rows travel from a step on, and the step times both ways that decided it."""
        self._write({"event": "pipeline", "step": step, **decided})

    def postpone(self, step: int, decided: Mapping[str, object]) -> None:
        """Which share of the weight gradients waits from a step on, the step times that decided it, what is kept."""
        self._write({"event": "postpone", "step": step, **decided})

    def picture(self, step: int, name: str, picture: Mapping[str, object] | None) -> None:
        """What an extension of the run has to tell at an evaluation or a checkpoint, as an event of its name."""
        if picture is not None:
            self._write({"event": name, "step": step, **picture})

    def checkpoint(self, step: int, path: str | os.PathLike[str]) -> None:
        """A checkpoint that is complete on disk."""
        self._write({"event": "checkpoint", "step": step, "path": os.fspath(path)})

    def notice(self, step: int, text: str) -> None:
        """Something that whoever started the run should know, in a sentence."""
        if not self._sinks:
            self._untold.append(text)
        self._write({"event": "notice", "step": step, "text": text})

    def untold(self) -> list[str]:
        """Notices from before there was a sink; asked once."""
        texts = list(self._untold)
        self._untold.clear()
        return texts

    def stopped(self, step: int, path: str | os.PathLike[str] | None) -> None:
        """The run was told to stop after this step; it goes on from this checkpoint."""
        self._write({"event": "stopped", "step": step, "path": None if path is None else os.fspath(path)})

    def end(self, summary: Mapping[str, object]) -> None:
        """The run is over; `print_summary` says which names the summary may hold."""
        self._write({"event": "end", **summary})

    def close(self) -> None:
        """Close every sink, also when one of them fails."""
        with contextlib.ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)
            self._sinks = []

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, event: Event) -> None:
        plain = {name: value if type(value) in _PLAIN else scalar(value) for name, value in event.items()}
        plain["time"] = round(time.time(), 3)
        for sink in self._sinks:
            sink.write(plain)


def time_fields(ranks: Sequence[Parts], *, tokens: int, seconds: float | None) -> dict[str, object]:
    """The fields of a step event that say how long it took and, where ranks have been compared, why."""
    if not ranks:
        rate = tokens / seconds if seconds else None
        return {"step_ms": None if seconds is None else 1000 * seconds, "tokens_per_s": rate}
    everybody = total(ranks) if len(ranks) > 1 else ranks[0]
    seconds = everybody.total / len(ranks)
    fields: dict[str, object] = {
        "step_ms": 1000 * seconds,
        "tokens_per_s": tokens / seconds if seconds > 0 else None,
        **everybody.shares(),
    }
    late = slowest(ranks)
    return fields if late is None else {**fields, "slowest": late.rank, "slowest_by": late.cause}


def scalar(value: object) -> object:
    """The Python number inside a tensor or numpy scalar; anything else as it is."""
    is_single = getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None))
    return value.item() if is_single else value  # type: ignore[attr-defined]
