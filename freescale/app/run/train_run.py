"""`freescale train` without parsing or printing: one rank of a run from set-up to report."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from freescale import trace
from freescale.app.arguments import say
from freescale.app.run.own_code import check_own_code, write_own_code
from freescale.app.run.resume_choice import check_same_recipe, checkpoints_for, on_change_of_data
from freescale.app.run.run_summary import describe, origin
from freescale.check import CheckReport
from freescale.comm.world import Ranks, device_name, from_first, join_ranks, keep_failures_in
from freescale.data import OnChange, is_dataset, load_manifest, when_prepared
from freescale.errors import ConfigError, TrainingError
from freescale.model import drawn_by_rank
from freescale.pages import write_report
from freescale.recipe import (
    Config,
    build_run,
    build_source,
    open_span_file,
    same_recipe,
    start_digests,
    start_tables,
)
from freescale.trace import read_metrics, stage
from freescale.train import (
    GuestSink,
    JsonlSink,
    Judge,
    MetricSink,
    MllogSink,
    Progress,
    Resumed,
    Run,
    StopRequest,
    TensorBoardSink,
    judged_event,
    kept_facts,
    open_tracker,
    resume,
    sole_run,
    stop_on_sigterm,
    train,
)

OpenTerminal = Callable[[int], MetricSink]


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
    if is_dataset(out):
        raise ConfigError(
            "run.out is a data set: a run there would write its files among those of the data",
            got=out,
            next_step="choose another run.out",
        )
    keep_failures_in(out)
    with (
        stop_on_sigterm(stop),
        join_ranks(
            device=config.run.device, timeout_s=config.comm.timeout_s, silent_s=config.comm.silent_s
        ) as ranks,
        sole_run(out, first=ranks.is_first),
    ):
        with stage("set up"):
            ranks.agree({**same_recipe(config), **start_digests(config), **(agreed or {})}, subject="the run")
            source = build_source_together(
                config, ranks, on_change=on_change_of_data(out, resume, new_data=new_data)
            )
            code = check_own_code(config, source, ranks, done=checked)
            if resume == "never":
                _clear(out, ranks)
            progress = Progress()
            paths, judged = _found(config, resume, ranks)
            run = build_run(config, source, ranks, progress, stop=stop, judged=judged)
            resumed = _resume(run, config, paths, new_data=new_data)
            begun = start_tables(config, run) if resumed.path is None else []
            run.evaluation.judge = judge
            untold = progress.untold()
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
            for text in [*untold, *code.told, *begun, *resumed.notices, *run.evaluation.notices, *known]:
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


def _say_taken(config: Config, cache: Path, *, again: bool) -> None:
    """A raw file that is prepared on the way tells what it was taken for, as `freescale prepare` does."""
    say(f"prepared {config.data.path} into {cache}" + (", in the place of other input" if again else ""))
    for line in load_manifest(cache).get("taken", []):
        say(f"  {line}")


def build_source_together(config: Config, ranks: Ranks, *, on_change: OnChange = "refuse") -> Any:
    """The data set; rank 0 goes first, because it may have to prepare a raw file."""
    cache = Path(config.run.out) / "data"
    if ranks.is_first:
        before = when_prepared(cache)
        source = build_source(config, cache=cache, on_change=on_change)
        if when_prepared(cache) != before:
            _say_taken(config, cache, again=before is not None)
    ranks.barrier()
    return source if ranks.is_first else build_source(config, cache=cache, on_change="keep")


def save_cost_model(run: Run, path: Path, *, name: str) -> None:
    """What the steps of this run cost, for `balance.cost_model` of the next one; nothing if too few were measured."""
    model = run.rebalancer.fit(hardware=device_name(run.ranks.device), model=name)
    if model is not None:
        model.save(path)


def _found(config: Config, how: str, ranks: Ranks) -> tuple[list[Path], Mapping[str, Any] | None]:
    """Checkpoints to start from, and how the run was judged by then, on all ranks the same."""

    def find() -> tuple[list[Path], Mapping[str, Any] | None]:
        paths = checkpoints_for(Path(config.run.out), how, config)
        return paths, kept_facts(paths).get("protocol")

    return from_first(find, ranks=ranks, what="find a checkpoint")


def _resume(run: Run, config: Config, paths: Sequence[Path], *, new_data: bool) -> Resumed:
    """Bring back the state the run goes on from, on all ranks the same."""
    return resume(
        run,
        paths,
        accept=lambda path, meta: check_same_recipe(path, meta["recipe"], config),
        new_data=new_data,
    )


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
    if not any((out / name).exists() for name in (".gitignore", ".git")):
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
    if config.run.mllog:
        progress.add(
            MllogSink(
                out / "mllog.txt",
                recipe=config.as_dict(),
                resume_step=step,
                train_samples=run.train_samples,
                eval_samples=min(len(run.evaluation.valid.lengths()), config.eval.max_users or sys.maxsize),
            )
        )
    for sink in others:
        progress.add(sink)


def _clear(out: Path, ranks: Ranks) -> None:
    """Forget an earlier run in this folder, and only what a run writes."""
    if ranks.is_first and (out / "config.yaml").exists():
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        for name in ("metrics.jsonl", "mllog.txt", "report.html", "trace.json"):
            (out / name).unlink(missing_ok=True)
        trace.remove(out)
    ranks.barrier()
