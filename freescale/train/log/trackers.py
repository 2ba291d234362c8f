"""Sinks for trackers that other people look after: Weights & Biases, MLflow; and a log sent to one afterwards.

A tracker is never on by itself, whatever is installed: a recipe or a program names it. metrics.jsonl stays the record;
names are those of TensorBoard's sink: `train/loss`, `eval/hr@10`, `test/hr@10`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from freescale.errors import ConfigError, FreeScaleError
from freescale.trace import Event, numeric_fields, step_of
from freescale.train.log.events import MetricSink
from freescale.train.log.sinks import TensorBoardSink

TRACKERS = ("tensorboard", "wandb", "mlflow")


class WandbSink:
    """Every number of a run's steps and evaluations for Weights & Biases.

    Args:
        project: of Weights & Biases.
        name: of the run there.
        config: the recipe, shown beside the run.
        resume_step: the step training continues after. The tracker cannot go back: steps it has seen are left out.
        options: more of `wandb.init`, e.g. mode="offline".
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        **options: Any,
    ) -> None:
        wandb = _package("wandb")
        self._run = wandb.init(project=project, name=name, config=dict(config or {}), **options)
        # Evaluations of the best state speak of an earlier step than the lines before: each kind has its own axis.
        for group in ("train", "eval", "test"):
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")
        self._after = resume_step or 0

    def write(self, event: dict[str, object]) -> None:
        """Send the numbers of a step or eval event."""
        group, step = _group(event), step_of(event)
        if group is None or step is None or (group == "train" and step <= self._after):
            return
        self._run.log({f"{group}/step": step, **_scalars(group, event)})

    def close(self) -> None:
        """Send what is held back."""
        self._run.finish()


class MlflowSink:
    """Every number of a run's steps and evaluations for MLflow.

    Args:
        experiment: of MLflow; made if it is not there.
        name: of the run there.
        config: the recipe, as parameters.
        resume_step: the step training continues after; earlier ones are left out.
        tracking_uri: where MLflow keeps runs; its own default unless given.
    """

    def __init__(
        self,
        experiment: str,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        mlflow = _package("mlflow")
        self._client = mlflow.MlflowClient(tracking_uri)
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._run_id = self._client.create_run(number, run_name=name).info.run_id
        for section, keys in (config or {}).items():
            for key, value in keys.items():
                self._client.log_param(self._run_id, f"{section}.{key}", str(value)[:500])
        self._after = resume_step or 0

    def write(self, event: dict[str, object]) -> None:
        """Send the numbers of a step or eval event."""
        group, step = _group(event), step_of(event)
        if group is None or step is None or (group == "train" and step <= self._after):
            return
        for name, value in _scalars(group, event).items():
            # MLflow allows no @ in names.
            self._client.log_metric(self._run_id, name.replace("@", "_at_"), value, step=step)

    def close(self) -> None:
        """The run has ended."""
        self._client.set_terminated(self._run_id)


def open_tracker(kind: str, where: str, *, resume_step: int | None = None, **options: Any) -> MetricSink:
    """A tracker by its name.

    Args:
        kind: "tensorboard", "wandb" or "mlflow".
        where: folder, project or experiment.
        resume_step: the step training continues after.
        options: name and config of the run, where the tracker has a place for them.
    """
    if kind == "tensorboard":
        return TensorBoardSink(where, resume_step=resume_step)
    if kind == "wandb":
        return WandbSink(where, resume_step=resume_step, **options)
    if kind == "mlflow":
        return MlflowSink(where, resume_step=resume_step, **options)
    raise ConfigError("there is no such tracker", got=kind, allowed=", ".join(TRACKERS))


def replay(events: Iterable[Event], sink: MetricSink) -> int:
    """Hand the events of a run that is over, or was interrupted, to a sink; how many had something for it."""
    sent = 0
    for event in events:
        sink.write(dict(event))
        sent += _group(event) is not None
    sink.close()
    return sent


def default_place(kind: str, run_dir: Path) -> str:
    """Where a tracker keeps a run unless told otherwise: a folder in the run, or a project called as its folder."""
    if kind == "tensorboard":
        return os.fspath(run_dir / "tensorboard")
    return run_dir.resolve().parent.name or "freescale"


def _group(event: Mapping[str, object]) -> str | None:
    group = {"step": "train", "eval": "eval"}.get(str(event.get("event")))
    return "test" if group is not None and event.get("split") == "test" else group


def _scalars(group: str, event: dict[str, object]) -> dict[str, Any]:
    return {f"{group}/{name}": event[name] for name in numeric_fields([event])}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FreeScaleError(
            f"this tracker needs the {name} package",
            got=str(error),
            next_step=f"pip install '.[{name}]' in the clone, or pip install {name}",
        ) from error
