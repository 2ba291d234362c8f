"""Commands about time: report, profile, simulate, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from freescale.app.arguments import Plugins, load_plugins, say, split_arguments
from freescale.errors import FreeScaleError


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
    say(str(write_report(paths[0])))
    if compare is not None:
        from freescale.pages import comparison_lines, write_comparison

        say(str(write_comparison(paths[0], compare)))
        for line in comparison_lines(paths[0], compare):
            say(line)


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
        say(problem)
    say(str(out))


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
    plugin: Plugins = None,
) -> None:
    """Measure this machine's GPU or CPU for `freescale simulate`; under five minutes."""
    load_plugins(plugin)
    from freescale.recipe import load_config

    recipe, overrides = split_arguments(arguments or [])
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
        say(f"{name}: {rate:,.4g}")
    say(f"{out}: a step varies by {measured.jitter:.1%}; {measured.facts['seconds']:.0f} s")


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

        say(json.dumps(answer.as_json()))
        return
    from freescale.sim import answer_lines

    for line in answer_lines(answer):
        say(line)
    for path in (page, timeline):
        if path is not None:
            say(str(path))


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
