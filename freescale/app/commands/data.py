"""Commands about data and tables: prepare, plan ids, keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from freescale.app.arguments import Plugins, load_plugins, say
from freescale.errors import ConfigError, DataError

if TYPE_CHECKING:
    from freescale.data import IdKinds


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT", help="Raw file, or a folder of CSV, JSON lines or Parquet files; also s3://..."
        ),
    ],
    out_dir: Annotated[Path, typer.Argument(help="New folder for the data set.")],
    format: Annotated[
        str, typer.Option(help="auto, movielens, inter, pairs, sequences, csv, jsonl or parquet.")
    ] = "auto",
    user: Annotated[str | None, typer.Option(help="Name of the user column (csv, jsonl, parquet).")] = None,
    item: Annotated[str | None, typer.Option(help="Name of the item column.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Name of the time column; '' for none: file order.")
    ] = None,
    action: Annotated[
        str | None, typer.Option(help="Name of the action or rating column; '' for none.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="Fields of text without a header, in order: user,item,time,action; _ ignores one."),
    ] = None,
    separator: Annotated[str | None, typer.Option(help="Column separator of a text file.")] = None,
    time_unit: Annotated[
        str, typer.Option(help="Unit of times that are numbers: s, ms, us, ns; auto tells it by their size.")
    ] = "auto",
    actions: Annotated[
        str | None,
        typer.Option(help="Numbers of actions in words: view=0,buy=1, or words in order; else by frequency."),
    ] = None,
    bad_lines: Annotated[
        str, typer.Option(help="stop at the first line that cannot be used, or skip and count them.")
    ] = "stop",
    texts: Annotated[
        Path | None, typer.Option(help="Titles and categories of the items: item::title::genres, or CSV.")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="YAML with a section `features`: columns to keep, and what they are.")
    ] = None,
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
    user_ids: Annotated[
        str | None, typer.Option(help="Kind of user ids: int64, uint64 or text; found out unless given.")
    ] = None,
    item_ids: Annotated[str | None, typer.Option(help="Kind of item ids.")] = None,
    rewrite: Annotated[
        bool, typer.Option(help="Copy histories that could stay in the Parquet files they are in.")
    ] = False,
    min_events: Annotated[int, typer.Option(help="Leave out users with fewer events.")] = 3,
    memory_mb: Annotated[int, typer.Option(help="Memory to sort in; the rest is spilled to disk.")] = 512,
    overwrite: Annotated[bool, typer.Option(help="Replace a data set that is already there.")] = False,
    plugin: Plugins = None,
) -> None:
    """Turn raw interactions into Parquet shards plus a length index."""
    load_plugins(plugin)
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from freescale.data import ColumnNames
    from freescale.data import prepare as prepare_data

    given = {"user": user, "item": item, "time": time, "action": action}
    names = {role: name for role, name in given.items() if name is not None}
    kinds = {role: kind for role, kind in (("user", user_ids), ("item", item_ids)) if kind is not None}
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
            format=format,
            columns=ColumnNames(**names),
            separator=separator,
            header=names_in_order(columns),
            time_unit=time_unit,
            actions=None if actions is None else numbers_of_actions(actions),
            bad_lines=bad_lines,
            min_events=min_events,
            memory_mb=memory_mb,
            texts=texts,
            schema=schema,
            items=items,
            users=users,
            item_header=names_in_order(item_columns),
            user_header=names_in_order(user_columns),
            lacking=lacking,
            new_items=new_items,
            id_kinds=cast("IdKinds", kinds),
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


def names_in_order(columns: str | None) -> list[str] | None:
    """`user,item,time` as names."""
    return None if columns is None else [name.strip() for name in columns.split(",")]


def numbers_of_actions(actions: str) -> list[str] | dict[str, float]:
    """`view=0,buy=1` as numbers of words; `view,buy` as words in order."""
    words = [word.strip() for word in actions.split(",")]
    if "=" not in actions:
        return words
    pairs = [word.rpartition("=") for word in words]
    try:
        return {word.strip(): float(number) for word, _, number in pairs}
    except ValueError:
        raise DataError(
            "The numbers of the actions cannot be read",
            got=actions,
            allowed="view=0,buy=1 (a number for every word), or view,buy (numbers from 0)",
        ) from None


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
    """List recipe keys with their types, defaults and meanings; with --plugin, those of your kinds, too."""
    load_plugins(plugin)
    from freescale.recipe import describe_keys, describe_options

    rows = [*describe_keys(), *describe_options()]
    found = [row for row in rows if word is None or word.lower() in f"{row[0]} {row[3]}".lower()]
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
