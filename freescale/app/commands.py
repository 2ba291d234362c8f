"""What each command does, without parsing or printing: train, evaluate, export."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from freescale import trace
from freescale.app.arguments import say
from freescale.app.own_code import check_own_code, read_own_code, write_own_code
from freescale.app.run_summary import describe, origin
from freescale.check import CheckReport
from freescale.comm.world import Ranks, device_name, join_ranks, keep_failures_in, one_rank
from freescale.data import IntArray, is_dataset, load_manifest, names_of_items
from freescale.embedding import learns_ids
from freescale.errors import CheckpointError, ConfigError, TrainingError
from freescale.model import compresses, drawn_by_rank, retrieves
from freescale.pages import write_report
from freescale.pipeline import TABLE
from freescale.recipe import (
    Config,
    build_run,
    build_source,
    encoder_shape,
    export_features,
    free_keys,
    load_config,
    open_span_file,
    read_recipe,
    same_recipe,
)
from freescale.trace import decode, read_metrics, stage
from freescale.train import (
    GuestSink,
    JsonlSink,
    Judge,
    MetricSink,
    Progress,
    Resumed,
    Run,
    StopRequest,
    TensorBoardSink,
    best_in,
    default_place,
    from_first,
    judged_event,
    load_run,
    open_tracker,
    read_meta,
    replay,
    resume,
    saved_in,
    sole_run,
    stop_on_sigterm,
    train,
    write_export,
)

OpenTerminal = Callable[[int], MetricSink]
_TRIES = 5


def train_run(
    config: Config,
    *,
    resume: str,
    open_terminal: OpenTerminal,
    new_data: bool = False,
    sinks: Sequence[MetricSink] = (),
    judge: Judge | None = None,
    checked: CheckReport | None = None,
    agreed: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Train as this rank of a run; returns the summary. Only rank 0 writes files and lines.

    Args:
        config: the recipe.
        resume: "auto", "never", or a run or checkpoint folder.
        open_terminal: (total steps) -> where lines go.
        new_data: go on from a checkpoint though it has learnt from other data.
        sinks: where events go besides; closed at the end.
        judge: may end the run at an evaluation.
        checked: what a check of the code has found before; else code that is not ours is checked here.
        agreed: more that all ranks must see alike.
    """
    out, stop = Path(config.run.out), StopRequest()
    keep_failures_in(out)
    with (
        stop_on_sigterm(stop),
        join_ranks(
            device=config.run.device, timeout_s=config.comm.timeout_s, silent_s=config.comm.silent_s
        ) as ranks,
        sole_run(out, first=ranks.is_first),
    ):
        with stage("set up"):
            ranks.agree({**same_recipe(config), **(agreed or {})}, subject="the run")
            source = build_source_together(config, ranks)
            code = check_own_code(config, source, ranks, done=checked)
            if resume == "never":
                _clear(out, ranks)
            progress = Progress()
            run = build_run(config, source, ranks, progress, stop=stop)
            resumed = _resume(run, config, resume, new_data=new_data)
            run.evaluation.judge = judge
            if ranks.is_first:
                guests = [GuestSink(sink, tell=progress.notice) for sink in sinks]
                terminal = open_terminal(run.timetable.total_steps)
                _open_sinks(run, config, resumed.step, [terminal, *guests])
                write_own_code(out, code)
                _tell_judge(judge, out)
            if resumed.story is not None:
                progress.resume(resumed.step, str(resumed.story), **resumed.story.facts(), origin=origin())
            facts = describe(run, config, source)
            if not code.report.ok:
                facts["run"]["one curve"] = "NOT on the one curve (run.check=warn)"
            progress.start(facts, total_steps=run.timetable.total_steps, origin=origin())
            known = drawn_by_rank(run.state.model) if code.report.ok else []
            for text in [*code.told, *resumed.notices, *run.evaluation.notices, *known]:
                progress.notice(resumed.step, text)
            open_span_file(run, config)
        try:
            summary = train(run, first_step=resumed.step)
            run.accounts.close()
            ranks.barrier()  # the report reads the spans of every rank
            if ranks.is_first:
                _check_still_there(out)
                save_cost_model(run, out / "cost_model.json", name=config.model.kind)
                progress.end({**summary, "report": str(out / "report.html")})
                write_report(out)
            return summary
        finally:
            run.accounts.close()
            progress.close()


def _check_still_there(out: Path) -> None:
    """What was written into a folder that somebody has removed meanwhile went nowhere, and no write has said so."""
    if not (out / "config.yaml").exists():
        raise TrainingError(
            "the run folder was removed, or emptied, while the run was on: what it had learnt is gone",
            got=out,
            next_step="run the same command again: it starts afresh",
        )


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
    source = run.evaluation.test.source
    meta = read_meta(path)
    catalog = known_items(run)
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
        facts={
            "trained_steps": meta["step"],
            "best": meta["best"],
            "data": source.name,
            "items": config.items.kind,
            "evaluation": run.evaluation.protocol.facts(),
            **({"own_code": own} if (own := read_own_code(run_dir)) else {}),
        },
    )


def replay_run(run_dir: Path, *, to: str, place: str | None = None) -> tuple[int, str]:
    """Send what a run has logged to a tracker afterwards; how many events, and where they went."""
    log = run_dir / "metrics.jsonl"
    if not log.exists():
        raise CheckpointError(
            "this is not a run folder: it has no metrics.jsonl",
            got=run_dir,
            next_step="give the folder a run was trained in (its run.out)",
        )
    where = place or default_place(to, run_dir)
    recipe = read_recipe(run_dir / "config.yaml") if (run_dir / "config.yaml").exists() else {}
    facts: dict[str, Any] = {} if to == "tensorboard" else {"name": run_dir.resolve().name, "config": recipe}
    with log.open("rb") as lines:
        events = [event for event in map(decode, lines) if event is not None]
    return replay(events, open_tracker(to, where, **facts)), where


def known_items(run: Run) -> IntArray:
    """Items the model has vectors for, ascending: those with rows of their own, where such rows are all there is."""
    id_map = run.state.id_maps.get(TABLE)
    if id_map is not None and learns_ids(id_map) and run.state.model.items is None:
        ids: IntArray = id_map.residents()[0].cpu().numpy()
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
    run = build_run(config, _source_as_it_was(config), one_rank(device=device), Progress())
    return config, run, _load_best(run, run_dir)


def _load_best(run: Run, run_dir: Path) -> Path:
    """Load the best checkpoint; another one where a training that is still going on has just replaced it."""
    for _ in range(_TRIES):
        path = best_in(run_dir / "checkpoints")
        if path is None:
            raise CheckpointError(
                "the run has no checkpoint yet",
                got=run_dir,
                next_step=f"freescale train {run_dir / 'config.yaml'}",
            )
        try:
            load_run(run, path)
        except CheckpointError:
            if path.exists():
                raise
        else:
            return path
    raise CheckpointError(
        "the run replaces its checkpoints faster than one can be read", got=run_dir, next_step="try again"
    )


def _source_as_it_was(config: Config) -> Any:
    """The data set of a run that was trained; who looks at a run writes nothing into it."""
    cache = Path(config.run.out) / "data"
    return build_source(config, cache=cache if is_dataset(cache) else None)


def _say_taken(config: Config, cache: Path) -> None:
    """A raw file that is prepared on the way tells what it was taken for, as `freescale prepare` does."""
    say(f"prepared {config.data.path} into {cache}")
    for line in load_manifest(cache).get("taken", []):
        say(f"  {line}")


def build_source_together(config: Config, ranks: Ranks) -> Any:
    """The data set; rank 0 goes first, because it may have to prepare a raw file."""
    cache = Path(config.run.out) / "data"
    if ranks.is_first:
        was_there = is_dataset(cache)
        source = build_source(config, cache=cache)
        if not was_there and is_dataset(cache):
            _say_taken(config, cache)
    ranks.barrier()
    return source if ranks.is_first else build_source(config, cache=cache)


def save_cost_model(run: Run, path: Path, *, name: str) -> None:
    """What the steps of this run cost, for `balance.cost_model` of the next one; nothing if too few were measured."""
    model = run.rebalancer.fit(hardware=device_name(run.ranks.device), model=name)
    if model is not None:
        model.save(path)


def find_checkpoints(out: Path, resume: str) -> list[Path]:
    """Checkpoints to start from, the one to prefer first: all of a run, or the one named; none for a fresh start."""
    if resume == "never":
        return []
    if resume == "auto":
        return saved_in(out / "checkpoints")[::-1]
    path = Path(resume)
    found = [path] if path in saved_in(path.parent) else saved_in(path / "checkpoints")[::-1]
    if not found:
        raise CheckpointError(
            "there is no checkpoint to resume from",
            got=path,
            allowed="auto, never, RUN_DIR or RUN_DIR/checkpoints/step-N",
        )
    return found


def _resume(run: Run, config: Config, how: str, *, new_data: bool) -> Resumed:
    """Bring back the state the run goes on from, on all ranks the same."""
    out = Path(config.run.out)
    run.checkpoints.open()
    paths = from_first(lambda: _checkpoints_for(out, how, config), ranks=run.ranks, what="find a checkpoint")
    return resume(
        run,
        paths,
        accept=lambda path, meta: _check_same_recipe(path, meta["recipe"], config),
        new_data=new_data,
    )


def _checkpoints_for(out: Path, how: str, config: Config) -> list[Path]:
    """Checkpoints to start from.

    A run that starts from another one's needs a folder of its own, or it would write over what is there; started again,
    it goes on with what it has written since.
    """
    paths, folder = find_checkpoints(out, how), out / "checkpoints"
    if not paths or paths[0].parent.resolve() == folder.resolve():
        return paths
    saved, recipe = saved_in(folder)[::-1], out / "config.yaml"
    if any(_began_from(path, Path(how)) for path in saved):
        return saved
    if saved:
        raise CheckpointError(
            f"{out} holds another run than the one to resume from",
            got=f"--resume {how}, and {len(saved)} checkpoints up to {saved[0].name} in run.out",
            next_step="choose another run.out, go on with the run there (--resume auto), or remove it (--resume never)",
        )
    if recipe.exists():
        _check_same_recipe(folder / paths[0].name, load_config(recipe).as_dict(), config)
    return paths


def _began_from(checkpoint: Path, other: Path) -> bool:
    """Whether the run of this checkpoint started from the other checkpoint, or from one of that run."""
    try:
        origin = read_meta(checkpoint).get("begun_from")
    except CheckpointError:
        return False
    return origin is not None and other.resolve() in (Path(origin), Path(origin).parent.parent)


def _check_same_recipe(path: Path, saved: Mapping[str, Any], config: Config) -> None:
    """A run goes on with the recipe it was started with, or it would leave its curve."""
    # A key that came later did then what its default does now.
    defaults = Config().as_dict()
    # The length of the run is part of the curve when the learning rate depends on it.
    free = free_keys() - ({"run.steps", "run.epochs"} if config.optim.schedule == "cosine" else set())
    different = [
        f"{section}.{key}: {then!r} there, {value!r} now"
        for section, keys in config.as_dict().items()
        # Of sections whose keys are made up, such as features, one may be gone, too.
        for key in {**keys, **({} if defaults[section] else saved.get(section, {}))}
        for value in [keys.get(key)]
        for then in [_plain(saved.get(section, {}).get(key, defaults[section].get(key)))]
        if f"{section}.{key}" not in free and _plain(value) != then
    ]
    if different:
        raise ConfigError(
            f"{path.parent.parent} holds a run with another recipe:\n  - " + "\n  - ".join(different),
            next_step="choose another run.out, or start over in this one with --resume never",
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _tell_judge(judge: Judge | None, out: Path) -> None:
    """A judge hears of the evaluations behind a run that goes on; what it decides of them is not asked."""
    if judge is None:
        return
    for event in read_metrics(out / "metrics.jsonl").evals:
        judge.decide(judged_event(event))


def _open_sinks(run: Run, config: Config, step: int, others: Sequence[MetricSink]) -> None:
    out, progress, pending = Path(config.run.out), run.progress, run.evaluation.pending
    recipe = out / "config.yaml"
    recipe.write_text(config.to_yaml(), encoding="utf-8")
    if not (out / ".gitignore").exists():
        (out / ".gitignore").write_text("*\n", encoding="utf-8")  # a run in a repository is no part of it
    progress.add(JsonlSink(out / "metrics.jsonl", resume_step=step, evaluates_again=pending))
    if config.run.tensorboard:
        progress.add(TensorBoardSink(out / "tensorboard", resume_step=step))
    for kind in ("wandb", "mlflow"):
        place = getattr(config.run, kind)
        if place is not None:
            facts = {"name": out.name, "config": config.as_dict()}
            tracker = open_tracker(kind, place, resume_step=step, **facts)
            progress.add(GuestSink(tracker, tell=progress.notice))
    for sink in others:
        progress.add(sink)


def _clear(out: Path, ranks: Ranks) -> None:
    """Forget an earlier run in this folder, and only what a run writes."""
    if ranks.is_first and (out / "config.yaml").exists():
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        for name in ("metrics.jsonl", "report.html", "trace.json"):
            (out / name).unlink(missing_ok=True)
        trace.remove(out)
    ranks.barrier()
