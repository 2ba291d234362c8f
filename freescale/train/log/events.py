"""A run's events and the files that keep them: metrics.jsonl always, TensorBoard on request.

An event is a dictionary with a kind: `resume`, `start`, `step`, `eval`, `balance`, `pipeline`, `ranks`, `checkpoint`,
`notice`, `stopped`, `end`, or the name of an extension of the run (`ids`, `experts`). `Progress` makes the events and
hands each to every sink; ranks that should stay silent are given no sinks. Steps are handed in when their time is
accounted for, some steps later; a `tick` tells those who watch that the run moves.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from freescale.errors import FreeScaleError
from freescale.trace import POPULARITY, REPEAT, Event, Parts, decode, numeric_fields, slowest, step_of, total

Facts = Mapping[str, Mapping[str, object]]
"""What a run is, as section -> name -> value."""


_MOST_UNTOLD = 100


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
        plain = {name: _scalar(value) for name, value in event.items()} | {"time": round(time.time(), 3)}
        for sink in self._sinks:
            sink.write(plain)


class JsonlSink:
    """One line of strict JSON per event, flushed at once: a killed process loses at most a cut last line.

    Args:
        path: the file; events are appended to those that are in it.
        resume_step: the step training continues after. Later events, a cut line, a test and an `end` are taken out
            and no second `start` is written, so that the file reads as if the run had never stopped;
            0 empties it. None keeps every whole line.
        evaluates_again: the evaluation of that step is still to come, too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume_step: int | None = None,
        evaluates_again: bool = False,
    ) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._evaluates_again = evaluates_again
        self._resumed = self._rewind(resume_step) and resume_step is not None
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, event: dict[str, object]) -> None:
        """Append the event; NaN and infinities, which JSON does not have, become null."""
        if event.get("event") == "start" and self._resumed:
            return
        self._file.write(json.dumps(_strict(event), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rewind(self, resume_step: int | None) -> bool:
        """Leave only the events before the resumed step; True if a start is among them."""
        if not self._path.exists():
            return False
        has_start = False
        aside = self._path.with_name(self._path.name + ".rewound")
        with self._path.open("rb") as old, aside.open("wb") as new:
            for line in old:
                event = decode(line)
                if event is not None and self._is_behind(event, resume_step):
                    has_start |= event["event"] == "start"
                    new.write(line if line.endswith(b"\n") else line + b"\n")
        # The old file stays whole until the new one is: a crash in between costs nothing.
        aside.replace(self._path)
        return has_start

    def _is_behind(self, event: Mapping[str, object], resume_step: int | None) -> bool:
        """Whether a run that goes on after `resume_step` has this event behind it."""
        if resume_step is None:
            return True
        # A run that goes on tests its best state again, also one that had tested it and was killed before its end.
        is_last = event["event"] == "end" or event.get("split") == "test"
        if is_last or resume_step == 0:
            return False
        # An evaluation of the best state, after later steps.
        step = step_of({"step": event.get("trained_steps", event.get("step"))}) or 0
        again = self._evaluates_again and event["event"] == "eval"
        return step < resume_step or (step == resume_step and not again)


class TensorBoardSink:
    """Scalars for TensorBoard, named as in metrics.jsonl: `train/loss`, `eval/hr@10`, `test/hr@10`."""

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise FreeScaleError(
                "TensorBoard output needs the tensorboard package",
                got=str(error),
                next_step="pip install freescale[tensorboard]",
            ) from error
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(os.fspath(path), purge_step=purge_step)

    def write(self, event: dict[str, object]) -> None:
        """Add every number of a step or eval event as a scalar at its step."""
        group = {"step": "train", "eval": "eval"}.get(str(event.get("event")))
        if group is None:
            return
        if event.get("split") == "test":
            group = "test"
        for name in numeric_fields([event]):
            self._writer.add_scalar(f"{group}/{name}", event[name], step_of(event))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def time_fields(ranks: Sequence[Parts], *, tokens: int, seconds: float | None) -> dict[str, object]:
    """The fields of a step event that say how long it took and, where ranks have been compared, why."""
    if not ranks:
        rate = tokens / seconds if seconds else None
        return {"step_ms": None if seconds is None else 1000 * seconds, "tokens_per_s": rate}
    everybody = total(ranks)
    seconds = everybody.total / len(ranks)
    fields: dict[str, object] = {
        "step_ms": 1000 * seconds,
        "tokens_per_s": tokens / seconds if seconds > 0 else None,
        **everybody.shares(),
    }
    late = slowest(ranks)
    return fields if late is None else {**fields, "slowest": late.rank, "slowest_by": late.cause}


def _strict(value: object) -> object:
    """The value in types strict JSON has: no NaN, no tensors or numpy scalars, text for everything else."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    plain = _scalar(value)
    return str(value) if plain is value else _strict(plain)


def _scalar(value: object) -> object:
    """The Python number inside a tensor or numpy scalar; anything else as it is."""
    is_single = getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None))
    return value.item() if is_single else value  # type: ignore[attr-defined]
