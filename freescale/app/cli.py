"""The command line: parses and prints, nothing else. torch is imported only by the commands that need it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from freescale.app.exit_codes import run_to_exit_code
from freescale.errors import FreeScaleError

app = typer.Typer(
    name="freescale",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

plan_app = typer.Typer(help="Answer questions before a run.", no_args_is_help=True)
app.add_typer(plan_app, name="plan")


def _show_version(wanted: bool) -> None:
    if wanted:
        from freescale import __version__

        _print(f"freescale {__version__}")
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Train sequence recommendation models with almost no wasted GPU time."""


RunDir = Annotated[Path, typer.Argument(help="Folder of a run (run.out of its recipe).")]


@app.command()
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
    resume: Annotated[
        str, typer.Option(help="auto: go on from the last checkpoint; never: start over; or a folder.")
    ] = "auto",
) -> None:
    """Train a model; without a recipe, HSTU on embedded synthetic data.

    A restarted command goes on where it stopped. `freescale keys` lists every KEY.
    """
    from freescale.recipe import load_config

    recipe, overrides = _split_arguments(arguments or [])
    config = load_config(recipe, overrides)
    command = ["train", *(arguments or []), "--resume", resume]
    if virtual_gpus is not None:
        _train_on_virtual_gpus(command, virtual_gpus, nproc=nproc, device=config.run.device)
        return
    if nproc > 1 and "RANK" not in os.environ:
        from freescale.comm.world import launch

        launch(command, num_ranks=nproc)
        return
    from freescale.app.commands import train_run
    from freescale.train import TerminalSink

    train_run(
        config,
        resume=resume,
        open_terminal=lambda total: TerminalSink(total_steps=total, log_every=config.run.log_every),
    )


def _train_on_virtual_gpus(command: list[str], num_ranks: int, *, nproc: int, device: str) -> None:
    from freescale.comm.world import check_request, launch, virtual_gpus

    check_request(num_ranks, nproc=nproc, device=device)
    with virtual_gpus(num_ranks) as shared:
        Console(stderr=True).print(escape(shared.message), highlight=False, soft_wrap=True)
        launch(command, num_ranks=num_ranks, environment=shared.environment)


@app.command()
def prepare(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Raw file, or a folder of CSV/Parquet files.")
    ],
    out_dir: Annotated[Path, typer.Argument(help="New folder for the data set.")],
    format: Annotated[
        str, typer.Option(help="auto, movielens, inter, pairs, sequences, csv or parquet.")
    ] = "auto",
    user: Annotated[str | None, typer.Option(help="Name of the user column (csv, parquet).")] = None,
    item: Annotated[str | None, typer.Option(help="Name of the item column.")] = None,
    time: Annotated[str | None, typer.Option(help="Name of the time column.")] = None,
    action: Annotated[str | None, typer.Option(help="Name of the action or rating column.")] = None,
    separator: Annotated[str | None, typer.Option(help="Column separator of a text file.")] = None,
    texts: Annotated[
        Path | None, typer.Option(help="Titles and categories of the items: item::title::genres, or CSV.")
    ] = None,
    min_events: Annotated[int, typer.Option(help="Leave out users with fewer events.")] = 3,
    memory_mb: Annotated[int, typer.Option(help="Memory to sort in; the rest is spilled to disk.")] = 512,
    overwrite: Annotated[bool, typer.Option(help="Replace a data set that is already there.")] = False,
) -> None:
    """Turn raw interactions into Parquet shards plus a length index."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from freescale.data import ColumnNames
    from freescale.data import prepare as prepare_data

    given = {"user": user, "item": item, "time": time, "action": action}
    names = {role: name for role, name in given.items() if name is not None}
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=1.0)
        summary = prepare_data(
            source,
            out_dir,
            format=format,
            columns=ColumnNames(**names),
            separator=separator,
            min_events=min_events,
            memory_mb=memory_mb,
            texts=texts,
            overwrite=overwrite,
            progress=lambda done, message: bar.update(task, completed=done, description=message),
        )
    _print(
        f"{out_dir}: {summary.num_users:,} users, {summary.num_items:,} items, {summary.num_events:,} events"
    )
    _print(
        f"read as {summary.source_format}: {summary.decided}; left out {summary.dropped_users:,} users with fewer "
        f"than {min_events} events"
    )
    if summary.num_texts is not None:
        _print(f"{summary.num_texts:,} of {summary.num_items:,} items have texts")


@app.command()
def evaluate(
    run_dir: RunDir,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cached: Annotated[
        bool, typer.Option("--cached", help="As serving does: compress histories, answer from token caches.")
    ] = False,
) -> None:
    """Evaluate the best checkpoint of a run on its test targets."""
    import json

    from freescale.app.commands import evaluate_run

    result = evaluate_run(run_dir, cached=cached)
    if json_output:
        _print(json.dumps(result))
        return
    table = Table(
        "metric", "model", "popularity", title=escape(f"{result['checkpoint']}: {result['protocol']}")
    )
    for name, value in result["metrics"].items():
        baseline = result["popularity"].get(name)
        table.add_row(name, _number(value), _number(baseline))
    Console().print(table)


@app.command()
def export(run_dir: RunDir, out_dir: Annotated[Path, typer.Argument(help="New folder.")]) -> None:
    """Export the best checkpoint: safetensors, a manifest, item vectors as Parquet."""
    from freescale.app.commands import export_run

    path = export_run(run_dir, out_dir)
    for file in sorted(path.iterdir()):
        _print(f"{file}  {file.stat().st_size:,} bytes")


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR | FILES", help="Folder of a run; with --trace, torch profiler files, one a rank."
        ),
    ],
    compare: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="An earlier run: write RUN_DIR/compare.html, too.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Account for torch profiler traces of any program.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --trace: the page to write; trace-report.html by itself.")
    ] = None,
) -> None:
    """Show where the time went: RUN_DIR/report.html and trace.json from a run's log, or a page from profiler traces."""
    if trace:
        if compare is not None:
            raise FreeScaleError(
                "--compare takes two runs, --trace takes profiler traces",
                got="both",
                next_step="leave one of them out",
            )
        _report_traces(paths, out or Path("trace-report.html"))
        return
    if out is not None:
        raise FreeScaleError(
            "--out goes with --trace: the page of a run lies in its folder",
            got=f"--out {out}",
            next_step=f"freescale report {paths[0]}, and copy {paths[0] / 'report.html'}",
        )
    from freescale.pages import write_report

    if len(paths) > 1:
        raise FreeScaleError(
            "report takes one run folder",
            got=" ".join(map(str, paths)),
            next_step="--compare OTHER_DIR for two runs, --trace FILES for profiler traces",
        )
    _print(str(write_report(paths[0])))
    if compare is not None:
        from freescale.pages import comparison_lines, write_comparison

        _print(str(write_comparison(paths[0], compare)))
        for line in comparison_lines(paths[0], compare):
            _print(line)


def _report_traces(files: list[Path], out: Path) -> None:
    from freescale.pages import write_trace_report
    from freescale.units import percent

    account = write_trace_report(files, out)
    columns = ("compute", "straggler", "comm", "host")
    table = Table("rank", "ms a step", *columns, "bubble", "any kernel")
    for rank, parts in account.parts().items():
        busy = account.busy[rank]
        table.add_row(
            str(rank),
            f"{1000 * parts.total / len(account.ranks[rank]):,.2f}",
            *(percent(parts.share(name)) for name in columns),
            percent(parts.bubble),
            percent(busy.busy / busy.window) if busy.window else "-",
        )
    Console().print(table)
    for problem in account.problems:
        _print(problem)
    _print(str(out))


@app.command()
def profile(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE ...]", help="The model to measure: a recipe and changes to it."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The profile to write.")] = Path("profile.json"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seconds: Annotated[
        float, typer.Option(help="Time for steps; the rest takes a minute more.", min=1.0)
    ] = 90.0,
    samples: Annotated[int, typer.Option(help="Samples of the largest batch.", min=1)] = 32,
    threads: Annotated[int, typer.Option(help="Threads of a CPU rank.", min=1)] = 1,
    virtual_gpus: Annotated[
        int | None,
        typer.Option(metavar="N", help="Measure N ranks that share one GPU, side by side.", min=1),
    ] = None,
) -> None:
    """Measure this machine's GPU or CPU for `freescale simulate`; under five minutes."""
    from freescale.recipe import load_config

    recipe, overrides = _split_arguments(arguments or [])
    config = load_config(recipe, overrides)
    from freescale.pages import replace_file
    from freescale.profiling import measure_profile
    from freescale.sim import profile_table

    console = Console(stderr=True)
    measured = measure_profile(
        config,
        device=device,
        seconds=seconds,
        most_samples=samples,
        threads=threads,
        virtual_gpus=virtual_gpus or 0,
        command=" ".join(["freescale", *sys.argv[1:]]),
        say=lambda text: console.print(f"measuring {text}", highlight=False),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, measured.to_json())
    Console().print(profile_table(measured))
    for name, rate in measured.rates.items():
        _print(f"{name}: {rate:,.4g}")
    _print(f"{out}: a step varies by {measured.jitter:.1%}; {measured.facts['seconds']:.0f} s")


@app.command()
def simulate(
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE ...]", help="workload.*, cluster.*, setting.*, features.*; see --keys."
        ),
    ] = None,
    gpus: Annotated[
        str, typer.Option(help="Numbers of GPUs (of ranks, for a CPU profile): 8,64,256,1024.")
    ] = "8,64,256",
    profile: Annotated[
        str, typer.Option(help="A profile that ships, or a file of `freescale profile`.")
    ] = "h200",
    cluster: Annotated[str, typer.Option(help="h100, h200, b200, cpu, or a YAML file.")] = "h100",
    data: Annotated[Path | None, typer.Option(help="A prepared data set: take its lengths.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="lognormal:MEDIAN,SIGMA,LONGEST, pareto:..., fixed:N, or a file of lengths."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="KEY=A,B,C", help="Try several values of one key.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Dollars for a GPU and hour.", min=0.0)] = None,
    steps: Annotated[int, typer.Option(help="Steps to simulate.", min=5)] = 200,
    mtbf_hours: Annotated[float | None, typer.Option(help="Let GPUs fail this often, each.", min=1.0)] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write an HTML page.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a trace of three ranks for ui.perfetto.dev.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave the sensitivity out.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List every KEY with its default and stop.")] = False,
) -> None:
    """Predict what many GPUs would give: step time, bubbles, limits and price, feature by feature."""
    if keys:
        from freescale.sim import described_keys

        rows = list(described_keys(profile=profile, cluster=cluster))
        listed = Table(Column("key", min_width=max(len(name) for name, _, _ in rows)), "default", "meaning")
        for name, default, text in rows:
            listed.add_row(name, escape(default), escape(text))
        Console().print(listed)
        return
    if data is not None and lengths is not None:
        raise FreeScaleError(
            "--data and --lengths both say where lengths come from",
            got=f"--data {data} --lengths {lengths}",
            next_step="leave one of them out",
        )
    from freescale.sim import simulate_from_options

    answer = simulate_from_options(
        changes=changes or [],
        gpus=gpus,
        profile=profile,
        cluster=cluster,
        lengths=str(data) if data is not None else lengths,
        sweep=sweep,
        price=price,
        steps=steps,
        mtbf_hours=mtbf_hours,
        page=page,
        timeline=timeline,
        quick=quick,
    )
    if json_output:
        import json

        _print(json.dumps(answer.as_json()))
        return
    from freescale.sim import answer_lines

    for line in answer_lines(answer):
        _print(line)
    for path in (page, timeline):
        if path is not None:
            _print(str(path))


@app.command()
def doctor() -> None:
    """Show versions and devices, and test that this installation computes what it should."""
    from freescale.app.doctor import examine

    findings = examine()
    table = Table("what", "found", "", show_header=False)
    for finding in findings:
        table.add_row(finding.what, escape(finding.found), "[green]ok[/]" if finding.ok else "[red]FAILED[/]")
    Console().print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@plan_app.command("ids")
def plan_ids(
    num_ids: Annotated[int, typer.Argument(help="Different ids alive at a time.", min=1)],
    target: Annotated[float, typer.Option(help="Share of the ids that may share a row.")] = 0.0001,
    row_bytes: Annotated[
        int, typer.Option(help="Bytes of a row with its optimizer state (float32, dim 64, Adam: 768).", min=1)
    ] = 768,
) -> None:
    """How many rows and probes a zero-collision table needs, from measured tables."""
    from freescale.embedding import size_table

    table = Table("max_probe", "rows", "rows an id", "share a row", "by plain hashing", "GiB")
    for size in size_table(num_ids, target=target):
        table.add_row(
            str(size.max_probe),
            f"{size.num_rows:,}",
            f"{size.rows_per_id:g}",
            f"{size.collisions:.4%}",
            f"{size.plain_hash:.2%}",
            f"{size.num_rows * (row_bytes + 20) / 2**30:,.2f}",
        )
    Console().print(table)


@app.command()
def keys() -> None:
    """List every recipe key with its type, default and meaning."""
    from freescale.recipe import describe_keys

    table = Table("key", "type", "default", "meaning")
    for name, kind, default, help_text in describe_keys():
        table.add_row(name, escape(kind), escape(default), escape(help_text))
    Console().print(table)


def main() -> None:
    """What `freescale` runs."""
    # torch's threads spin while they wait for each other. On a machine that does other work, too, sleeping instead
    # trained 2.7 times as many tokens a second (2 busy cores). It must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run_to_exit_code(app)


def _split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """A leading argument without '=' is the recipe; the others are overrides."""
    if arguments and "=" not in arguments[0]:
        return arguments[0], arguments[1:]
    return None, arguments


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4f}"


def _print(text: str) -> None:
    Console().print(escape(text), highlight=False, soft_wrap=True)
