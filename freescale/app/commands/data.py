"""Commands about data and tables: prepare, plan ids, keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
    names_in_order,
)
from freescale.errors import ConfigError


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT", help="Raw file, or a folder of CSV, JSON lines or Parquet files; also s3://..."
        ),
    ],
    out_dir: Annotated[Path, typer.Argument(help="New folder for the data set.")],
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
    texts: Annotated[
        Path | None, typer.Option(help="Titles and categories of the items: item::title::genres, or CSV.")
    ] = None,
    schema: SchemaFile = None,
    items: Annotated[
        Path | None, typer.Option(help="Features of the items: CSV, JSON lines, inter or Parquet.")
    ] = None,
    users: Annotated[Path | None, typer.Option(help="Features of the users; the same.")] = None,
    item_columns: Annotated[
        str | None, typer.Option(help="Fields of --items without a header, in order: item,title,genres.")
    ] = None,
    user_columns: Annotated[str | None, typer.Option(help="The same of --users.")] = None,
    lacking: Annotated[
        str, typer.Option(help="stop where --items or --users lacks one of the events; none: no features.")
    ] = "stop",
    new_items: Annotated[
        str,
        typer.Option(
            help="keep items of --items that no event names, to be recommended by their features; or leave them out."
        ),
    ] = "leave",
    duplicates: Annotated[
        str, typer.Option(help="keep events with user, item, time and action of one before, or drop them.")
    ] = "keep",
    user_ids: UserIds = None,
    item_ids: ItemIds = None,
    rewrite: Annotated[
        bool, typer.Option(help="Copy histories that could stay in the Parquet files they are in.")
    ] = False,
    min_events: Annotated[int, typer.Option(help="Leave out users with fewer events.")] = 3,
    memory_mb: MemoryMb = 512,
    overwrite: Annotated[bool, typer.Option(help="Replace a data set that is already there.")] = False,
    plugin: Plugins = None,
) -> None:
    """Turn raw interactions into Parquet shards plus a length index."""
    load_plugins(plugin)
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from freescale.data import prepare as prepare_data

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
    console = Console(stderr=True)
    bar_columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*bar_columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=1.0)
        summary = prepare_data(
            source,
            out_dir,
            **options,
            min_events=min_events,
            texts=texts,
            items=items,
            users=users,
            item_header=names_in_order(item_columns),
            user_header=names_in_order(user_columns),
            lacking=lacking,
            new_items=new_items,
            duplicates=duplicates,
            rewrite=rewrite,
            overwrite=overwrite,
            progress=lambda done, message: bar.update(task, completed=done, description=message),
        )
    say(f"{out_dir}: {summary.num_users:,} users, {summary.num_items:,} items, {summary.num_events:,} events")
    say(
        f"read as {summary.source_format}: {summary.decided}; left out {summary.dropped_users:,} users with fewer "
        f"than {min_events} events"
    )
    for line in summary.taken:
        say(f"  {line}")
    if summary.num_texts is not None:
        say(f"{summary.num_texts:,} of {summary.num_items:,} items have texts")


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


def keys(
    word: Annotated[
        str | None, typer.Argument(metavar="[WORD]", help="Only keys with this word in name or meaning.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
    plugin: Plugins = None,
) -> None:
    """List recipe keys with their types, defaults and meanings: of sections, and of the kinds they can name.

    With --plugin, those of your kinds, too.
    """
    load_plugins(plugin)
    from freescale.recipe import describe_recipe

    found = [row for row in describe_recipe() if word is None or word.lower() in f"{row[0]} {row[3]}".lower()]
    if not found:
        raise ConfigError(
            "no recipe key has this word in its name or meaning",
            got=word,
            next_step="`freescale keys` lists all of them",
        )
    columns = ("key", "type", "default", "meaning")
    if as_json:
        typer.echo(json.dumps([dict(zip(columns, row)) for row in found], indent=1))
        return
    if not sys.stdout.isatty():  # whole names, one key a line, for grep and cut
        typer.echo("\n".join("\t".join(row) for row in found))
        return
    table = Table(*columns)
    for row in found:
        table.add_row(*map(escape, row))
    Console().print(table)
