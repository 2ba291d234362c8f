"""Commands about runs: train, evaluate, export, replay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from freescale.app.arguments import (
    COMMAND,
    Plugins,
    RunDir,
    load_plugins,
    number,
    pairs,
    say,
    split_arguments,
    typed_command,
)
from freescale.errors import ConfigError

if TYPE_CHECKING:
    from freescale.recipe import Config


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE ...]", help="A YAML recipe and changes to it."),
    ] = None,
    nproc: Annotated[int, typer.Option(help="Ranks to start on this machine.", min=1)] = 1,
    virtual_gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Ranks that share one GPU, each with its part of it (CUDA MPS).", min=1
        ),
    ] = None,
    nnodes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Machines, each with the same --nproc; start this on each.", min=1),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(metavar="R", help="This machine, from 0; with --nnodes.", min=0)
    ] = None,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Machine 0, where rank 0 waits; with --nnodes.")
    ] = None,
    resume: Annotated[
        str, typer.Option(help="auto: go on from the last checkpoint; never: start over; or a folder.")
    ] = "auto",
    new_data: Annotated[
        bool,
        typer.Option("--new-data", help="Go on from a checkpoint though it has learnt from other data."),
    ] = False,
    plugin: Plugins = None,
) -> None:
    """Train a model; without a recipe, HSTU on embedded synthetic data.

    A restarted command goes on where it stopped. SIGTERM saves a checkpoint after the step and ends with exit code
    75; a second one ends at once. `freescale keys` lists every KEY.
    """
    load_plugins(plugin)
    from freescale.recipe import load_config

    recipe, overrides = split_arguments(arguments or [])
    config = load_config(recipe, overrides)
    ranks = virtual_gpus or nproc * (nnodes or 1)
    _say_begun(config, num_ranks=ranks, first=not node_rank)
    command = ["train", *(arguments or []), "--resume", resume, *(["--new-data"] if new_data else [])]
    command += [word for module in plugin or [] for word in ("--plugin", module)]
    if virtual_gpus is not None:
        _train_on_virtual_gpus(command, virtual_gpus, nproc=nproc, nnodes=nnodes, device=config.run.device)
        return
    if _launched(command, nproc=nproc, nnodes=nnodes, node_rank=node_rank, master=master):
        return
    from freescale.app.run.train_run import train_run
    from freescale.train import TerminalSink

    train_run(
        config,
        resume=resume,
        new_data=new_data,
        open_terminal=lambda total: TerminalSink(total_steps=total, log_every=config.run.log_every),
    )


def _say_begun(config: Config, *, num_ranks: int, first: bool) -> None:
    """What is about to happen, before torch is imported: that takes seconds in which nothing else is said."""
    from freescale.comm.world import launched_by
    from freescale.version import __version__

    who = launched_by()
    if not first or COMMAND in os.environ or (who is not None and who.rank != 0):
        return  # another process has said so
    num_ranks = num_ranks if who is None else who.num_ranks
    ranks = "" if num_ranks == 1 else f", {num_ranks} ranks"
    text = f"freescale {__version__}: {config.model.kind} on {config.data.path}{ranks}, into {config.run.out}"
    Console(stderr=True).print(escape(f"{text}; loading torch"), highlight=False, soft_wrap=True)


def _launched(
    command: list[str], *, nproc: int, nnodes: int | None, node_rank: int | None, master: str | None
) -> bool:
    """Start the ranks of this machine and wait for them; False if this process is the one to train."""
    from freescale.comm.world import check_start, launch, nodes_asked_for

    nodes = nodes_asked_for(nnodes=nnodes, node_rank=node_rank, master=master, nproc=nproc)
    if nodes is None and (nproc == 1 or "RANK" in os.environ):
        return False
    if nodes is not None:
        errors = Console(stderr=True)
        check_start(nodes, say=lambda line: errors.print(escape(line), highlight=False, soft_wrap=True))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if nproc > cores:
        text = f"{nproc:,} ranks on {cores:,} cores of this machine: they take turns, each with memory of its own"
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
    launch(command, num_ranks=nproc, nodes=nodes, environment={COMMAND: typed_command()})
    return True


def _train_on_virtual_gpus(
    command: list[str], num_ranks: int, *, nproc: int, nnodes: int | None, device: str
) -> None:
    from freescale.comm.world import check_request, launch, virtual_gpus

    check_request(num_ranks, nproc=nproc, nnodes=nnodes or 1, device=device)
    with virtual_gpus(num_ranks) as shared:
        Console(stderr=True).print(escape(shared.message), highlight=False, soft_wrap=True)
        environment = {**shared.environment, COMMAND: typed_command()}
        launch(command, num_ranks=num_ranks, environment=environment)


def evaluate(
    run_dir: RunDir,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cached: Annotated[
        bool, typer.Option("--cached", help="As serving does: compress histories, answer from token caches.")
    ] = False,
    plugin: Plugins = None,
) -> None:
    """Evaluate the best checkpoint of a run on its test targets."""
    load_plugins(plugin)
    import json

    from freescale.app.run.opened_run import evaluate_run

    result = evaluate_run(run_dir, cached=cached)
    if json_output:
        say(json.dumps(result))
        return
    baselines = {"popularity": result["popularity"], "repeat last": result["repeat_last"]}
    known = {name: values for name, values in baselines.items() if values}
    say(f"{result['checkpoint']}: {result['protocol']}")
    table = Table("metric", "model", *known)
    for name, value in result["metrics"].items():
        table.add_row(name, number(value), *(number(values.get(name)) for values in known.values()))
    Console().print(table)


def export(
    run_dir: RunDir,
    out_dir: Annotated[Path, typer.Argument(help="New folder.")],
    to: Annotated[
        str, typer.Option(help="serving: a model to ask; torchrec: a checkpoint of the tables alone.")
    ] = "serving",
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE=WEIGHT", help="torchrec: name of a table's weight there; else as imported."
        ),
    ] = None,
    collision: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE=MODULE", help="torchrec: ManagedCollisionCollection of a table there."),
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option(metavar="TABLE=N", help="torchrec: rows of a table there.")
    ] = None,
    buckets: Annotated[
        int | None, typer.Option(help="torchrec: buckets of zero-collision tables there.", min=1)
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Export the best checkpoint: safetensors, a manifest, item vectors as Parquet; or tables for TorchRec."""
    load_plugins(plugin)
    if to == "torchrec":
        from freescale.app.run.torchrec_tables import export_torchrec

        for line in export_torchrec(
            run_dir,
            out_dir,
            names=pairs(name, option="--name"),
            collision=pairs(collision, option="--collision"),
            rows=pairs(rows, option="--rows"),
            buckets=buckets,
        ):
            say(line)
        return
    if to != "serving":
        raise ConfigError("a run can be exported to two places", got=to, allowed="serving, torchrec")
    import json

    from freescale.app.run.opened_run import export_run
    from freescale.exports import request_needs

    path = export_run(run_dir, out_dir)
    for file in sorted(path.iterdir()):
        say(f"{file}  {file.stat().st_size:,} bytes")
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    needs = request_needs(manifest)
    if needs and manifest["head"]["name"] == "tasks":
        say("score(history, candidates, features={...}, candidate_features={...}) needs:")
    elif needs:
        say("recommend(history, features={...}) needs:")
    for line in needs:
        say(f"  {line}")


def replay(
    run_dir: RunDir,
    to: Annotated[str, typer.Option(metavar="TRACKER", help="tensorboard, wandb or mlflow.")],
    place: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Folder of TensorBoard, project of wandb, experiment of MLflow; by itself as the run.",
        ),
    ] = None,
) -> None:
    """Send what a run has logged to a tracker, as if it had listened from the start; resumed runs are sent whole."""
    from freescale.app.run.opened_run import replay_run

    sent, where = replay_run(run_dir, to=to, place=place)
    say(f"sent {sent:,} steps and evaluations of {run_dir} to {to}: {where}")
