"""What each command does, without parsing or printing: train, evaluate, export."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from freescale import trace
from freescale.app.run_summary import describe
from freescale.comm.world import Ranks, device_name, join_ranks, keep_failures_in
from freescale.data import IntArray
from freescale.embedding import learns_ids
from freescale.errors import CheckpointError, ConfigError
from freescale.model import compresses, retrieves
from freescale.pages import write_report
from freescale.recipe import (
    Config,
    build_run,
    build_source,
    encoder_shape,
    free_keys,
    load_config,
    open_span_file,
    same_recipe,
)
from freescale.trace import stage
from freescale.train import (
    Checkpoints,
    JsonlSink,
    MetricSink,
    Progress,
    Run,
    TensorBoardSink,
    load_run,
    read_meta,
    sole_run,
    train,
    write_export,
)

OpenTerminal = Callable[[int], MetricSink]


def train_run(config: Config, *, resume: str, open_terminal: OpenTerminal) -> dict[str, Any]:
    """Train as this rank of a run; returns the summary. Only rank 0 writes files and lines.

    Args:
        config: the recipe.
        resume: "auto", "never", or a run or checkpoint folder.
        open_terminal: (total steps) -> where lines go.
    """
    out = Path(config.run.out)
    keep_failures_in(out)
    with (
        join_ranks(
            device=config.run.device, timeout_s=config.comm.timeout_s, silent_s=config.comm.silent_s
        ) as ranks,
        sole_run(out, first=ranks.is_first),
    ):
        with stage("set up"):
            ranks.agree(same_recipe(config), subject="the run")
            source = build_source_together(config, ranks)
            if resume == "never":
                _clear(out, ranks)
            progress = Progress()
            run = build_run(config, source, ranks, progress)
            resume_from = find_checkpoint(run.checkpoints, resume)
            if resume_from is not None:
                _check_same_recipe(resume_from, config)
            if ranks.is_first:
                _open_sinks(progress, config, resume_from, open_terminal(run.timetable.total_steps))
            progress.start(describe(run, config, source), total_steps=run.timetable.total_steps)
            open_span_file(run, config)
        try:
            summary = train(run, resume_from=resume_from)
            run.accounts.close()
            ranks.barrier()  # the report reads the spans of every rank
            if ranks.is_first:
                save_cost_model(run, out / "cost_model.json", name=config.model.kind)
                progress.end({**summary, "report": str(out / "report.html")})
                write_report(out)
            return summary
        finally:
            run.accounts.close()
            progress.close()


def evaluate_run(run_dir: Path, *, device: str = "auto", cached: bool = False) -> dict[str, Any]:
    """Evaluate the best checkpoint of a run on its test targets; `cached` as serving would, from token caches."""
    config, run, path = open_run(run_dir, device=device)
    model = run.state.model
    if cached and not (compresses(model.encoder) and retrieves(model.head)):
        raise ConfigError(
            "only retrieval models that compress histories are served from token caches",
            got=f"segments.recent={config.segments.recent}, head.kind={config.head.kind}",
            next_step="leave --cached out, or train with segments.recent=50",
        )
    metrics = dataclasses.replace(run.evaluation.evaluator, cached=cached).run(run.evaluation.test)
    return {
        "checkpoint": str(path),
        "protocol": run.evaluation.protocol + (", from token caches" if cached else ""),
        "metrics": metrics,
        "popularity": dict(run.evaluation.popularity.get("test", {})),
        "metric": run.evaluation.metric,
    }


def export_run(run_dir: Path, out: Path) -> Path:
    """Export the best checkpoint of a run for serving."""
    config, run, path = open_run(run_dir, device="cpu")
    source = run.evaluation.test.source
    meta = read_meta(path)
    # How experts were computed in training says nothing about the machine that serves them.
    served = dataclasses.replace(config.moe, backend="auto", save="preact")
    return write_export(
        out,
        model=run.state.model,
        items=run.evaluation.evaluator.items,
        catalog=known_items(run),
        encoder=encoder_shape(dataclasses.replace(config, moe=served), source),
        facts={
            "trained_steps": meta["step"],
            "best": meta["best"],
            "data": source.name,
            "items": config.items.kind,
        },
    )


def known_items(run: Run) -> IntArray:
    """Items the model has vectors for, ascending: those with rows of their own, where such rows are all there is."""
    if learns_ids(run.state.id_map) and run.state.model.items is None:
        ids: IntArray = run.state.id_map.residents()[0].cpu().numpy()
        return ids
    return run.evaluation.test.source.items.ids


def open_run(run_dir: Path, *, device: str) -> tuple[Config, Run, Path]:
    """The best state of a finished or interrupted run, in this one process."""
    recipe = run_dir / "config.yaml"
    if not recipe.exists():
        raise CheckpointError(
            "this is not a run folder: it has no config.yaml",
            got=run_dir,
            next_step="give the folder a run was trained in (its run.out)",
        )
    config = load_config(recipe, [f"run.out={run_dir}", f"run.device={device}"])
    with join_ranks(device=device) as ranks:
        run = build_run(config, build_source_together(config, ranks), ranks, Progress())
        path = run.checkpoints.best()
        if path is None:
            raise CheckpointError(
                "the run has no checkpoint yet", got=run_dir, next_step=f"freescale train {recipe}"
            )
        read_meta(path)
        load_run(run, path)
    return config, run, path


def build_source_together(config: Config, ranks: Ranks) -> Any:
    """The data set; rank 0 goes first, because it may have to prepare a raw file."""
    cache = Path(config.run.out) / "data"
    if ranks.is_first:
        source = build_source(config, cache=cache)
    ranks.barrier()
    return source if ranks.is_first else build_source(config, cache=cache)


def save_cost_model(run: Run, path: Path, *, name: str) -> None:
    """What the steps of this run cost, for `balance.cost_model` of the next one; nothing if too few were measured."""
    model = run.rebalancer.fit(hardware=device_name(run.ranks.device), model=name)
    if model is not None:
        model.save(path)


def find_checkpoint(checkpoints: Checkpoints, resume: str) -> Path | None:
    """The checkpoint to start from, or None for a fresh start."""
    if resume == "never":
        return None
    if resume == "auto":
        return checkpoints.latest()
    path = Path(resume)
    if path.name.startswith("step-") and path.is_dir():
        return path
    found = sorted(p for p in (path / "checkpoints").glob("step-*") if p.suffix != ".tmp")
    if not found:
        raise CheckpointError(
            "there is no checkpoint to resume from",
            got=path,
            allowed="auto, never, RUN_DIR or RUN_DIR/checkpoints/step-N",
        )
    return found[-1]


def _check_same_recipe(path: Path, config: Config) -> None:
    """A run goes on with the recipe it was started with, or it would leave its curve."""
    saved, now = read_meta(path)["recipe"], config.as_dict()
    # A key that came later did then what its default does now.
    defaults = Config().as_dict()
    # The length of the run is part of the curve when the learning rate depends on it.
    free = free_keys() - ({"run.steps", "run.epochs"} if config.optim.schedule == "cosine" else set())
    different = [
        f"{section}.{key}: {then!r} there, {value!r} now"
        for section, keys in now.items()
        for key, value in keys.items()
        for then in [saved.get(section, {}).get(key, _plain(defaults[section][key]))]
        if f"{section}.{key}" not in free and _plain(value) != then
    ]
    if different:
        raise ConfigError(
            f"{path.parent.parent} holds a run with another recipe:\n  - " + "\n  - ".join(different),
            next_step="choose another run.out, or start over in this one with --resume never",
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _open_sinks(progress: Progress, config: Config, resume_from: Path | None, terminal: MetricSink) -> None:
    out = Path(config.run.out)
    recipe = out / "config.yaml"
    recipe.write_text(config.to_yaml(), encoding="utf-8")
    step = int(resume_from.name.removeprefix("step-")) if resume_from else 0
    progress.add(JsonlSink(out / "metrics.jsonl", resume_step=step))
    if config.run.tensorboard:
        progress.add(TensorBoardSink(out / "tensorboard", resume_step=step))
    progress.add(terminal)


def _clear(out: Path, ranks: Ranks) -> None:
    """Forget an earlier run in this folder, and only what a run writes."""
    if ranks.is_first and (out / "config.yaml").exists():
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        for name in ("metrics.jsonl", "report.html", "trace.json"):
            (out / name).unlink(missing_ok=True)
        trace.remove(out)
    ranks.barrier()
