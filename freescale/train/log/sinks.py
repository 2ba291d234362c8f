"""The files that keep a run's events: metrics.jsonl always, TensorBoard on request."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from freescale.errors import FreeScaleError
from freescale.trace import decode, numeric_fields, step_of
from freescale.train.log.events import scalar


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
                next_step="pip install '.[tensorboard]' in the clone, or pip install tensorboard",
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
    plain = scalar(value)
    return str(value) if plain is value else _strict(plain)
