"""Commands about time: report, profile, simulate, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from typer.core import TyperCommand

from freescale.app.arguments import Plugins, load_plugins, say, split_arguments, typed_command
from freescale.errors import FreeScaleError


class ReportCommand(TyperCommand):
    """`--compare A B C` takes every folder up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give each of the folders a --compare of its own, which is how options that repeat are parsed."""
        return super().parse_args(ctx, _each_with_its_option(args, "--compare"))


def report(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN_DIR | FILES", help="Folder of a run; with --trace, torch profiler files, one a rank."
        ),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN_DIR ...",
            help="Hold the run against others, the baseline first: write RUN_DIR/compare.html, too.",
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show the page of a run that is going on, on this machine alone.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(help="With --live: where to listen; a free port by itself.", min=1, max=65535),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Account for torch profiler traces of any program.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --trace: the page to write; trace-report.html by itself.")
    ] = None,
) -> None:
    """Show where the time went: RUN_DIR/report.html and trace.json from a run's log, or a page from profiler traces.

    `freescale report RUN_DIR --compare BASELINE_DIR [OTHER_DIR ...]` holds runs against each other and says how sure
    their differences are. `--live` follows a run that is going on.
    """
    _refuse_mixed(compare=compare, live=live, port=port, trace=trace, out=out)
    if trace:
        _report_traces(paths or [], out or Path("trace-report.html"))
        return
    run = _one_run(paths or [], compare or [])
    if live:
        _serve_live(run, port or 0)
        return
    from freescale.pages import write_report

    say(str(write_report(run)))
    if compare:
        from freescale.pages import comparison_lines, write_comparison

        say(str(write_comparison(run, compare)))
        for line in comparison_lines(run, compare):
            say(line)


def _refuse_mixed(
    *, compare: list[Path] | None, live: bool, port: int | None, trace: bool, out: Path | None
) -> None:
    """An option that would do nothing is refused."""
    for first, second, is_mixed in (
        ("--compare", "--trace", compare and trace),
        ("--compare", "--live", compare and live),
        ("--live", "--trace", live and trace),
    ):
        if is_mixed:
            raise FreeScaleError(
                f"{first} and {second} make different pages", got="both", next_step="leave one of them out"
            )
    if out is not None and not trace:
        raise FreeScaleError(
            "--out goes with --trace: the page of a run lies in its folder",
            got=f"--out {out}",
            next_step="leave --out out, and copy report.html from the folder of the run",
        )
    if port is not None and not live:
        raise FreeScaleError(
            "--port goes with --live", got=f"--port {port}", next_step="add --live, or leave it out"
        )


def _one_run(paths: list[Path], compare: list[Path]) -> Path:
    """The run whose folder gets the pages."""
    if len(paths) == 1:
        return paths[0]
    if paths:
        raise FreeScaleError(
            "report takes one run folder",
            got=" ".join(map(str, paths)),
            next_step=f"freescale report {paths[-1]} --compare {' '.join(map(str, paths[:-1]))}, "
            "or --trace FILES for profiler traces",
        )
    others = " ".join(map(str, compare[:-1]))
    raise FreeScaleError(
        "report needs the folder of the run that is reported",
        got=f"--compare {' '.join(map(str, compare))}" if compare else "none",
        next_step=f"freescale report {compare[-1]} --compare {others or 'BASELINE_DIR'}"
        if compare
        else "freescale report RUN_DIR",
    )


def _serve_live(run: Path, port: int) -> None:
    from freescale.pages import LivePage

    with LivePage(run, port=port) as page:
        say(f"{page.address}")
        say(
            "The page follows the run. Only this machine can open it, with this address; from another one: "
            f"ssh -L {page.port}:127.0.0.1:{page.port} HOST. Ctrl-C ends it."
        )
        try:
            page.serve()
        except KeyboardInterrupt:
            say("The live page has ended. The run goes on.")


def _each_with_its_option(args: list[str], option: str) -> list[str]:
    """`--compare A B C` as `--compare A --compare B --compare C`."""
    spread: list[str] = []
    inside = first = False
    for word in args:
        if word.startswith("-"):
            inside = first = word == option
            spread.append(word)
            continue
        spread += [word] if first or not inside else [option, word]
        first = False
    return spread


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
    from freescale.profiling import check_place, doubts, measure_profile
    from freescale.sim import profile_table

    check_place(out)
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
    replace_file(out, measured.to_json())
    Console().print(profile_table(measured))
    for name, rate in measured.rates.items():
        say(f"{name}: {rate:,.4g}")
    say(f"{out}: a step varies by {measured.jitter:.1%}; {measured.facts['seconds']:.0f} s")
    for doubt in doubts(measured):
        say(doubt)


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
    cluster: Annotated[
        str | None,
        typer.Option(
            help="h100, h200, b200, cpu, or a YAML file; without it h100, or cpu where a CPU was profiled."
        ),
    ] = None,
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
        command=typed_command(),
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


def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Also measure whether the host keeps the GPU busy; some seconds.")
    ] = False,
) -> None:
    """Show versions and devices, and test that this installation computes what it should."""
    from freescale.app.doctor import examine

    findings = examine(gpu=gpu)
    table = Table("what", "found", "", show_header=False)
    for finding in findings:
        table.add_row(finding.what, escape(finding.found), "[green]ok[/]" if finding.ok else "[red]FAILED[/]")
    Console().print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)
