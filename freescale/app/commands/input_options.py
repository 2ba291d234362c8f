"""How raw input is read: what `prepare` and `log append` ask for in the same words, and hand on in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, cast

import typer

from freescale.errors import DataError
from freescale.registry import names

if TYPE_CHECKING:
    from freescale.data import ColumnNames, IdKinds

Format = Annotated[str, typer.Option(help=f"auto, {', '.join(names('format'))}.")]
UserColumn = Annotated[
    str | None, typer.Option("--user", help="Name of the user column (csv, jsonl, parquet).")
]
ItemColumn = Annotated[str | None, typer.Option("--item", help="Name of the item column.")]
TimeColumn = Annotated[
    str | None, typer.Option("--time", help="Name of the time column; '' keeps file order, which no log can.")
]
ActionColumn = Annotated[
    str | None, typer.Option("--action", help="Name of the action or rating column; '' for none.")
]
Columns = Annotated[
    str | None,
    typer.Option(help="Fields of text without a header, in order: user,item,time,action; _ ignores one."),
]
Separator = Annotated[str | None, typer.Option(help="Column separator of a text file.")]
TimeUnit = Annotated[
    str, typer.Option(help="Unit of times that are numbers: s, ms, us, ns; auto tells it by their size.")
]
Actions = Annotated[
    str | None,
    typer.Option(help="Numbers of actions in words: view=0,buy=1, or words in order; else by frequency."),
]
BadLines = Annotated[str, typer.Option(help="stop at a line that cannot be used, or skip and count them.")]
SchemaFile = Annotated[
    Path | None,
    typer.Option(help="YAML with a section `features`: columns of events to keep, and what they are."),
]
UserIds = Annotated[
    str | None, typer.Option(help="Kind of user ids: int64, uint64 or text; found out unless given.")
]
ItemIds = Annotated[str | None, typer.Option(help="Kind of item ids.")]
MemoryMb = Annotated[int, typer.Option(help="Memory to sort in; the rest is spilled to disk.")]


class InputOptions(TypedDict):
    """As `freescale.data.prepare` and `append_log` take them."""

    format: str
    columns: ColumnNames
    separator: str | None
    header: list[str] | None
    time_unit: str
    actions: list[str] | dict[str, float] | None
    bad_lines: str
    schema: Path | None
    id_kinds: IdKinds
    memory_mb: int


def input_options(
    *,
    format: str,
    user: str | None,
    item: str | None,
    time: str | None,
    action: str | None,
    columns: str | None,
    separator: str | None,
    time_unit: str,
    actions: str | None,
    bad_lines: str,
    schema: Path | None,
    user_ids: str | None,
    item_ids: str | None,
    memory_mb: int,
) -> InputOptions:
    """What was typed, as the library takes it."""
    from freescale.data import ColumnNames

    named = {"user": user, "item": item, "time": time, "action": action}
    kinds = {"user": user_ids, "item": item_ids}
    return {
        "format": format,
        "columns": ColumnNames(**{role: name for role, name in named.items() if name is not None}),
        "separator": separator,
        "header": names_in_order(columns),
        "time_unit": time_unit,
        "actions": None if actions is None else numbers_of_actions(actions),
        "bad_lines": bad_lines,
        "schema": schema,
        "id_kinds": cast("IdKinds", {role: kind for role, kind in kinds.items() if kind is not None}),
        "memory_mb": memory_mb,
    }


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
