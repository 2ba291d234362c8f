"""Where a run lives and how long it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from freescale.recipe.reading.keys import key

if TYPE_CHECKING:
    from freescale.recipe.config import Config
    from freescale.train import Timetable


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Where the run lives and how long it goes on."""

    out: str = key("runs/latest", "folder for config, metrics, checkpoints and the report", free=True)
    steps: int | None = key(
        None, "length of the run in steps; null: run.epochs decides", at_least=1, free=True
    )
    epochs: float = key(8.0, "passes over the data when run.steps is null", at_least=0.001, free=True)
    seed: int = key(
        1, "seed of batches, negatives, initial weights and dropout", at_least=0, at_most=2**63 - 1
    )
    follow: bool = key(
        False, "with a log: at its end wait for new windows and go on, instead of stopping", free=True
    )
    log_every: int = key(20, "steps between two log lines", at_least=1, free=True)
    eval_every: int | None = key(
        None,
        "steps between evaluations; 0: never, also not at the end; null: once an epoch",
        at_least=0,
        free=True,
    )
    first_eval: int | None = key(
        None, "no evaluation before this step; null: from the first that is due", at_least=1, free=True
    )
    stop_at: float | None = key(None, "stop when eval.metric is this good in an evaluation", free=True)
    checkpoint_every: int | None = key(
        None, "steps between checkpoints; null: at every evaluation", at_least=1, free=True
    )
    keep: int = key(2, "number of latest checkpoints to keep, besides the best", at_least=1, free=True)
    patience: int | None = key(
        None, "stop after this many evaluations without a better one", at_least=1, free=True
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "where to compute", free=True)
    capture: Literal["auto", "off"] = key(
        "auto",
        "on a GPU, pad batches to a few sizes and replay their steps as CUDA graphs where that can be done",
        free=True,
    )
    check: Literal["stop", "warn"] = key(
        "stop",
        "code that is not ours and leaves the one curve: stop before the first step, or train on, marked",
        free=True,
    )
    tensorboard: bool = key(False, "also write TensorBoard files to RUN_DIR/tensorboard", free=True)
    wandb: str | None = key(None, "also send numbers to this project of Weights & Biases", free=True)
    mlflow: str | None = key(None, "also send numbers to this experiment of MLflow", free=True)
    mllog: bool = key(False, "also write the lines of MLPerf's rules to RUN_DIR/mllog.txt", free=True)


def problems(config: Config) -> list[str]:
    """A run needs a folder, and evaluations where something depends on them."""
    found = [] if config.run.out.strip() else ["run.out: must name a folder, got nothing"]
    if config.run.follow and config.run.steps is not None:
        found.append("run.steps: a run that follows a log has no last step; leave one of the two out")
    for name in ("patience", "first_eval", "stop_at"):
        if config.run.eval_every == 0 and getattr(config.run, name) is not None:
            found.append(f"run.{name}: needs evaluations, and run.eval_every=0 has none")
    if config.run.mllog and config.data.global_tokens is not None:
        found.append(
            "run.mllog: counts samples, and data.global_tokens makes their number differ; use global_batch"
        )
    return found


def timetable_of(config: Config, *, steps_per_epoch: int) -> Timetable:
    """How long the run is, and what is due when."""
    from freescale.train import Timetable

    return Timetable(
        total_steps=config.run.steps or max(1, round(config.run.epochs * steps_per_epoch)),
        eval_every=steps_per_epoch if config.run.eval_every is None else config.run.eval_every,
        checkpoint_every=config.run.checkpoint_every,
        first_eval=config.run.first_eval or 0,
    )
