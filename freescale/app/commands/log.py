"""Commands about logs that grow: append, show, drop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freescale.app.arguments import Plugins, load_plugins, say
from freescale.app.commands.input_options import (
    ActionColumn,
    Actions,
    BadLines,
    Columns,
    Format,
    ItemColumn,
    ItemIds,
    MemoryMb,
    SchemaFile,
    Separator,
    TimeColumn,
    TimeUnit,
    UserColumn,
    UserIds,
    input_options,
)
from freescale.errors import DataError

if TYPE_CHECKING:
    from freescale.data import WindowEntry

LogDir = Annotated[Path, typer.Argument(metavar="LOG", help="Folder of the log.")]

log_app = typer.Typer(
    help="A log of sealed windows: data that grows, trained on as it comes.", no_args_is_help=True
)


@log_app.command()
def append(
    log: LogDir,
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="Raw file, or a folder: files of it that are new are sealed. Or delta:PATH, "
            "iceberg:CATALOG.SPACE.NAME, kafka:HOST:PORT/TOPIC: what was added since the last append.",
        ),
    ],
    every: Annotated[
        str | None,
        typer.Option(help="Cut the input into windows: 1d, 6h, 30m or seconds; else one window for all."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Inputs of a row at most; 200, or what the log has.", min=1)
    ] = None,
    max_late: Annotated[
        str | None,
        typer.Option(
            help="Drop events older than the log's end by more than this: 2d; else none is dropped."
        ),
    ] = None,
    format: Format = "auto",
    user: UserColumn = None,
    item: ItemColumn = None,
    time: TimeColumn = None,
    action: ActionColumn = None,
    columns: Columns = None,
    separator: Separator = None,
    time_unit: TimeUnit = "auto",
    actions: Actions = None,
    bad_lines: BadLines = "stop",
    schema: SchemaFile = None,
    user_ids: UserIds = None,
    item_ids: ItemIds = None,
    memory_mb: MemoryMb = 512,
    plugin: Plugins = None,
) -> None:
    """Seal new events as the next windows of a log; each is there as a whole or not at all, each event once.

    Killed, the same command finishes what it began. Input that is in the log already is refused. The first append
    decides on --schema and --actions; later ones may leave them out.
    """
    load_plugins(plugin)
    from freescale.data import append_log

    options = input_options(
        format=format,
        user=user,
        item=item,
        time=time,
        action=action,
        columns=columns,
        separator=separator,
        time_unit=time_unit,
        actions=actions,
        bad_lines=bad_lines,
        schema=schema,
        user_ids=user_ids,
        item_ids=item_ids,
        memory_mb=memory_mb,
    )
    sealed = append_log(
        log,
        source,
        every=None if every is None else _seconds("--every", every),
        max_length=max_length,
        max_late=None if max_late is None else _seconds("--max-late", max_late),
        **options,
    )
    for entry in sealed.windows:
        say(f"{log}: {_in_words(entry)}")
    for line in sealed.taken:
        say(f"  {line}")


@log_app.command()
def show(log: LogDir) -> None:
    """List the windows of a log."""
    from freescale.data import load_log

    found = load_log(log)
    for entry in found.windows:
        say(_in_words(entry) + ("; deleted" if entry.deleted else ""))
    say(f"rows of at most {found.rules.max_length} inputs; fingerprint {found.fingerprint}")


@log_app.command()
def drop(
    log: LogDir,
    before: Annotated[int, typer.Option(help="Delete windows with numbers below this one.", min=1)],
) -> None:
    """Delete the histories of old windows; their entries stay, so runs go on at the steps they have reached."""
    from freescale.data import drop_windows

    found = drop_windows(log, before=before)
    gone = sum(entry.deleted for entry in found.windows)
    say(f"{log}: {gone:,} of {len(found.windows):,} windows are deleted")


def _in_words(entry: WindowEntry) -> str:
    from freescale.data import written

    said = (
        f"window {entry.number}, up to {written(entry.last)}: {entry.rows:,} rows, {entry.events:,} events, "
        f"{entry.targets:,} targets, {entry.items:,} items so far"
    )
    late = f"; {entry.late:,} events were late" if entry.late else ""
    return said + late + (f"; {entry.dropped:,} too late, dropped" if entry.dropped else "")


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def _seconds(option: str, text: str) -> int:
    """`1d` as seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    if not number.isdigit():
        raise DataError(
            f"{option} is not a length of time", got=text, allowed="such as 30m, 6h, 1d, 1w, or seconds"
        )
    return int(number) * _UNITS[unit]
