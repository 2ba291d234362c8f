"""The command line: what you can type. Commands parse and print only; torch is imported by those that need it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from freescale.app.arguments import say
from freescale.app.commands import data, log, prove, run, serve, tables, time
from freescale.app.exit_codes import run_to_exit_code

app = typer.Typer(
    name="freescale",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    run.train,
    data.prepare,
    run.evaluate,
    run.export,
    serve.publish,
    serve.compact,
    serve.serve,
    run.replay,
    time.report,
    time.profile,
    time.simulate,
    time.doctor,
    prove.prove,
    data.keys,
):
    app.command(cls=time.ReportCommand if _command is time.report else None)(_command)

app.command("import")(tables.import_tables)

plan_app = typer.Typer(help="Answer questions before a run.", no_args_is_help=True)
plan_app.command("ids")(data.plan_ids)
app.add_typer(plan_app, name="plan")
app.add_typer(log.log_app, name="log")


def _show_version(wanted: bool) -> None:
    if wanted:
        from freescale import __version__

        say(f"freescale {__version__}")
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Train sequence recommenders on one device or many, with the same losses and balanced ranks."""


def main() -> None:
    """What `freescale` runs."""
    # torch's threads spin while they wait for each other. On a machine that does other work, too, sleeping instead
    # trained 2.7 times as many tokens a second (2 busy cores). It must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run_to_exit_code(app)
