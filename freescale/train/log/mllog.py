"""A sink that writes what MLPerf's rules ask of a training run: lines `:::MLLOG {...}` in RUN_DIR/mllog.txt.

    init_start, submission_*, hyperparameters, init_stop, run_start, train_samples, eval_samples
    block_start ... block_stop, eval_start, eval_accuracy, eval_stop     for every evaluation
    run_stop                                                             success: run.stop_at is reached

A block ends with the last step before an evaluation, and there the evaluation begins. A run that is resumed appends:
its stream has one beginning.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freescale.trace import is_better, step_of

BENCHMARK = "dlrmv4"
_FROM_ENVIRONMENT = {
    "submission_org": "MLPERF_SUBMITTER",
    "submission_platform": "MLPERF_SUBMISSION_PLATFORM",
}


class MllogSink:
    """The run as MLPerf's compliance checker reads it.

    Args:
        path: the file.
        recipe: of the run, section by section.
        resume_step: the step training continues after; 0: it begins.
        train_samples: samples of an epoch.
        eval_samples: samples of an evaluation.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        recipe: Mapping[str, Mapping[str, Any]],
        resume_step: int,
        train_samples: int,
        eval_samples: int,
    ) -> None:
        self._recipe, self._train, self._eval = recipe, train_samples, eval_samples
        self._resumed = resume_step > 0 and Path(path).exists()
        self._file = Path(path).open("a" if self._resumed else "w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._step, self._at = resume_step, time.time()
        self._in_block = self._ended = self._reached = False
        if not self._resumed:
            self._line("cache_clear", True)
            self._line("init_start", None, kind="INTERVAL_START")

    def tick(self, event: dict[str, object]) -> None:
        """A step is done: where a block would end."""
        self._step, self._at = step_of(event) or self._step, time.time()

    def write(self, event: dict[str, object]) -> None:
        """Take what concerns the benchmark."""
        kind = event.get("event")
        if kind == "start" and not self._in_block:
            self._begin()
        elif kind == "step" and event.get("loss") is not None:
            step = step_of(event) or 0
            self._line("train_loss", event["loss"], samples_count=step * self._batch)
        elif kind == "eval" and event.get("split") == "valid":
            self._evaluated(event)
        elif kind == "end":
            self._end()

    def close(self) -> None:
        """Close the file; a run that broke off has no run_stop."""
        self._file.close()

    @property
    def _batch(self) -> int:
        return int(self._recipe["data"]["global_batch"])

    def _begin(self) -> None:
        if not self._resumed:
            for key, value in self._facts().items():
                self._line(key, value)
            self._line("init_stop", None, kind="INTERVAL_END")
            self._line("run_start", None, kind="INTERVAL_START")
            self._line("train_samples", self._train)
            self._line("eval_samples", self._eval)
        self._block()

    def _facts(self) -> dict[str, object]:
        recipe = self._recipe
        optim, table, run = recipe["optim"], recipe["embedding"], recipe["run"]
        share = self._batch / max(self._train, 1)
        every, first = run["eval_every"] or 0, run["first_eval"] or run["eval_every"] or 0
        return {
            "submission_benchmark": BENCHMARK,
            **{key: os.environ.get(name, "unnamed") for key, name in _FROM_ENVIRONMENT.items()},
            "submission_division": "closed",
            "submission_status": "onprem",
            "global_batch_size": self._batch,
            "gradient_accumulation_steps": optim["accumulate"],
            "seed": run["seed"],
            "opt_name": "Adam",
            "opt_base_learning_rate": optim["lr"],
            "opt_adam_beta_1": optim["beta1"],
            "opt_adam_beta_2": optim["beta2"],
            "opt_adam_epsilon": 1e-8,
            "opt_weight_decay": optim["weight_decay"],
            "opt_gradient_clip_norm": optim["clip_norm"] or 0.0,
            "opt_learning_rate_warmup_steps": optim["warmup_steps"],
            "opt_learning_rate_warmup_start_lr": 0.0,
            "opt_sparse_name": "RowWiseAdagrad"
            if table["optimizer"] == "rowwise_adagrad"
            else table["optimizer"],
            "opt_sparse_base_learning_rate": table["lr"],
            "max_sequence_length": recipe["model"].get("scale_length") or recipe["data"]["max_length"],
            "eval_every_data_pct": every * share,
            "skip_eval_epoch_pct": max(first - every, 0) * share,
        }

    def _block(self) -> None:
        self._at = time.time()  # what ends it may have been seen before
        self._line("block_start", None, kind="INTERVAL_START", at=self._at, **self._progress(self._step))
        self._in_block = True

    def _evaluated(self, event: Mapping[str, object]) -> None:
        step = step_of(event) or self._step
        told = self._progress(step)
        if self._in_block:
            self._line("block_stop", None, kind="INTERVAL_END", at=self._at, **told)
        self._line("eval_start", None, kind="INTERVAL_START", at=self._at, **told)
        metric = str(self._recipe["eval"]["metric"])
        value = event.get(metric)
        if isinstance(value, int | float):
            self._line("eval_accuracy", float(value), **told)
        self._line("eval_stop", None, kind="INTERVAL_END", **told)
        self._in_block = False
        target = self._recipe["run"].get("stop_at")
        if isinstance(value, int | float) and target is not None:
            self._reached = value == target or is_better(metric, float(value), float(target))
        if self._reached:
            self._end()
        else:
            self._step = step
            self._block()

    def _end(self) -> None:
        if self._ended:
            return
        told = self._progress(self._step)
        if self._in_block:
            self._line("block_stop", None, kind="INTERVAL_END", at=self._at, **told)
        status = "success" if self._reached else "aborted"
        self._line("run_stop", None, kind="INTERVAL_END", status=status, **told)
        self._ended, self._in_block = True, False

    def _progress(self, step: int) -> dict[str, Any]:
        samples = step * self._batch
        return {"samples_count": samples, "epoch_num": samples / max(self._train, 1)}

    def _line(
        self,
        key: str,
        value: object,
        *,
        kind: str = "POINT_IN_TIME",
        at: float | None = None,
        **metadata: object,
    ) -> None:
        line = {
            "namespace": "",
            "time_ms": int(1000 * (time.time() if at is None else at)),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "freescale", "lineno": 0, **metadata},
        }
        self._file.write(f":::MLLOG {json.dumps(line)}\n")
        self._file.flush()
