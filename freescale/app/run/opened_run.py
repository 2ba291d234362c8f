"""A run that was trained, opened in one process: evaluate, export, replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freescale.app.arguments import say
from freescale.app.run.own_code import read_own_code
from freescale.comm.world import one_rank
from freescale.data import IntArray, is_dataset, names_of_items
from freescale.embedding import learns_ids
from freescale.errors import CheckpointError, ConfigError, DamagedCheckpointError
from freescale.exports import RestOfItems, write_export
from freescale.model import compresses, retrieves
from freescale.pipeline import TABLE
from freescale.recipe import (
    Config,
    build_run,
    build_source,
    encoder_shape,
    export_features,
    load_config,
    read_recipe,
)
from freescale.trace import decode
from freescale.train import (
    Progress,
    Run,
    best_in,
    data_changes,
    default_place,
    kept_facts,
    load_run,
    open_tracker,
    read_meta,
    replay,
    saved_in,
)

_TRIES = 5


def evaluate_run(run_dir: Path, *, device: str = "auto", cached: bool = False) -> dict[str, Any]:
    """Evaluate the best checkpoint of a run on its test targets; `cached` as serving would, from token caches."""
    config, run, path = open_run(run_dir, device=device)
    if run.log is not None:
        raise ConfigError(
            "a run over a log has no test targets: every window is evaluated before it is learnt",
            got=run_dir,
            next_step="see the eval lines of the run, metrics.jsonl or the report",
        )
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
        "protocol": run.evaluation.protocol.words("test") + (", from token caches" if cached else ""),
        **run.evaluation.protocol.seen_facts(),
        "metrics": metrics,
        "popularity": dict(run.evaluation.popularity.get("test", {})),
        "repeat_last": dict(run.evaluation.repeat.get("test", {})),
        "metric": run.evaluation.metric,
    }


def export_run(run_dir: Path, out: Path) -> Path:
    """Export the best checkpoint of a run for serving."""
    config, run, path = open_run(run_dir, device="cpu")
    return write_run_export(out, config, run, read_meta(path), run_dir)


def write_run_export(out: Path, config: Config, run: Run, meta: Mapping[str, Any], run_dir: Path) -> Path:
    """Export the state that a run has, which is that of a checkpoint with these facts."""
    source = run.evaluation.test.source
    catalog = known_items(run, meta)
    features = run.evaluation.test.features
    # How experts were computed in training says nothing about the machine that serves them.
    served = dataclasses.replace(config.moe, backend="auto", save="preact")
    return write_export(
        out,
        model=run.state.model,
        items=run.evaluation.evaluator.items,
        catalog=catalog,
        names=names_of_items(source, catalog),
        encoder=encoder_shape(dataclasses.replace(config, moe=served), source, features),
        head={"kind": config.head.kind, "options": config.head.extra},
        features=export_features(config, features, embedding=run.state.embedding, id_maps=run.state.id_maps),
        rest=_rest_of_items(run),
        facts={
            "trained_steps": meta["step"],
            "best": meta["best"],
            "data": source.name,
            "items": config.items.kind,
            "evaluation": run.evaluation.protocol.facts(),
            **({"own_code": own} if (own := read_own_code(run_dir)) else {}),
        },
    )


def _rest_of_items(run: Run) -> RestOfItems | None:
    """Items without a row of their own, where a row is all there is of one: those a data set knows; of a log, any."""
    id_map, model = run.state.id_maps.get(TABLE), run.state.model
    if id_map is None or model.items is not None or run.evaluation.test.features is not None:
        return None
    known = None if run.log is not None else run.evaluation.test.source.items.ids
    return RestOfItems(run.state.embedding.tables[TABLE], id_map, known)


def replay_run(run_dir: Path, *, to: str, place: str | None = None) -> tuple[int, str]:
    """Send what a run has logged to a tracker afterwards; how many events, and where they went."""
    log = run_file(run_dir, "metrics.jsonl")
    where = place or default_place(to, run_dir)
    recipe = read_recipe(run_dir / "config.yaml") if (run_dir / "config.yaml").exists() else {}
    facts: dict[str, Any] = {} if to == "tensorboard" else {"name": run_dir.resolve().name, "config": recipe}
    with log.open("rb") as lines:
        events = [event for event in map(decode, lines) if event is not None]
    return replay(events, open_tracker(to, where, **facts)), where


def known_items(run: Run, meta: Mapping[str, Any] | None = None) -> IntArray:
    """Items the model has vectors for, ascending: those with rows of their own, where such rows are all there is."""
    id_map = run.state.id_maps.get(TABLE)
    if id_map is not None and learns_ids(id_map) and run.state.model.items is None:
        ids: IntArray = id_map.residents()[0].cpu().numpy()
        return ids
    if run.log is not None and meta is not None:
        # Not those of windows that came later.
        return run.log.source.items_of(max(1, int(meta["log"]["windows"])) - 1).ids
    return run.evaluation.test.source.items.ids


def open_run(run_dir: Path, *, device: str) -> tuple[Config, Run, Path]:
    """The best state of a finished or interrupted run, in this one process."""
    recipe = run_file(run_dir, "config.yaml")
    config = load_config(recipe, [f"run.out={run_dir}", f"run.device={device}"])
    _best_of(run_dir)  # or there is nothing to open
    judged = kept_facts(saved_in(run_dir / "checkpoints")[::-1]).get("protocol")
    run = build_run(config, _source_as_it_was(config), one_rank(device=device), Progress(), judged=judged)
    try:
        path = _load_best(run, run_dir)
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        changes = data_changes(read_meta(_best_of(run_dir)), run.state.data)
        if not changes:
            raise
        raise CheckpointError(
            "the run has learnt from other data than data.path holds, and its checkpoint does not fit these",
            got="; ".join(changes),
            next_step=f"bring back what was at {config.data.path}",
        ) from error
    for change in data_changes(read_meta(path), run.state.data):
        say(f"note   {path} has learnt from other data than data.path holds: {change}")
    return config, run, path


def _load_best(run: Run, run_dir: Path) -> Path:
    """Load the best checkpoint; another one where a training that is still going on has just replaced it.

    Where it is damaged, the newest that is not.
    """
    for _ in range(_TRIES):
        path = _best_of(run_dir)
        try:
            load_run(run, path)
        except DamagedCheckpointError as error:
            return _load_another(run, run_dir, path, error)
        except CheckpointError:
            if path.exists():
                raise
        else:
            return path
    raise CheckpointError(
        "the run replaces its checkpoints faster than one can be read", got=run_dir, next_step="try again"
    )


def _load_another(run: Run, run_dir: Path, best: Path, damage: DamagedCheckpointError) -> Path:
    others = [path for path in saved_in(run_dir / "checkpoints")[::-1] if path != best]
    for path in others:
        try:
            load_run(run, path)
        except DamagedCheckpointError:
            continue
        say(f"note   {damage.what}; {path.name} is taken instead, which is not the best")
        return path
    if not others:
        raise damage
    raise DamagedCheckpointError(
        f"all {len(others) + 1} checkpoints of the run are damaged",
        got=damage.what,
        next_step=f"freescale train {run_dir / 'config.yaml'} --resume never",
    )


def _best_of(run_dir: Path) -> Path:
    path = best_in(run_dir / "checkpoints")
    if path is None:
        raise CheckpointError(
            "the run has no checkpoint yet",
            got=run_dir,
            next_step=f"freescale train {run_dir / 'config.yaml'}",
        )
    return path


def _source_as_it_was(config: Config) -> Any:
    """The data set of a run that was trained; who looks at a run writes nothing into it."""
    cache = Path(config.run.out) / "data"
    return build_source(config, cache=cache if is_dataset(cache) else None, on_change="keep")


def run_file(run_dir: Path, name: str) -> Path:
    """A file that every run folder has."""
    path = run_dir / name
    if not path.exists():
        raise CheckpointError(
            f"this is not a run folder: it has no {name}",
            got=run_dir,
            next_step="give the folder a run was trained in (its run.out)",
        )
    return path
