"""What a schema means for the input: which columns of which file are read, and what must be there for that."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from freescale.data.columns.roles import ROLES, ColumnNames
from freescale.data.preparing.reading.raw_input import check_input
from freescale.data.preparing.reading.side_table import SideFile
from freescale.data.schema.feature import STRUCTURAL, Feature, Schema
from freescale.errors import DataError

_SIDES: tuple[Literal["item", "user"], ...] = ("item", "user")


@dataclass(frozen=True)
class SchemaInput:
    """What to read of events, items and users.

    Args:
        columns: names of the columns that every data set has.
        roles: parts to look for in the events.
        required: those of them that the schema names.
        features: of the events, as far as they are no such parts.
        sides: files of items and users.
        tables: of every feature that is a raw id.
    """

    columns: ColumnNames
    roles: tuple[str, ...] = tuple(ROLES)
    required: tuple[str, ...] = ()
    features: tuple[Feature, ...] = ()
    sides: tuple[SideFile, ...] = ()
    tables: Mapping[str, str] = field(default_factory=dict)


def schema_input(
    schema: Schema | None,
    *,
    columns: ColumnNames,
    files: Mapping[str, Path | None],
    headers: Mapping[str, Sequence[str] | None],
    time_unit: str,
    bad_lines: str,
    keeps_all: Collection[str] = (),
) -> SchemaInput:
    """What a schema asks of an input; without one, what it always was.

    Args:
        schema: the features, or None.
        columns: names that the user gave.
        files: of "item" and "user".
        headers: names of their fields, where their first lines do not have them.
        time_unit: of times that are plain numbers.
        bad_lines: "stop" or "skip".
        keeps_all: owners of whose files every row may be kept, also those that no event asks for.
    """
    _check_files(schema, files)
    if schema is None:
        return SchemaInput(columns)
    if columns.action and "action" not in schema:
        raise DataError(
            "The schema names no action, so none is kept",
            got=f"--action {columns.action}",
            next_step="name it in the schema: action: {of: event, is: number, outcome: true}",
        )
    if columns.action and schema["action"].column is None:
        schema = schema.with_feature(replace(schema["action"], column=columns.action))
    action = schema.features.get("action")
    # An action that is a number is read as it always was: words are numbered, true is 1.
    usual = action is not None and (action.of, action.kind) == ("event", "number")
    names = {name: schema[name].column for name in (*STRUCTURAL, "action") if name in schema}
    merged = replace(
        columns, **{name: name_in for name, name_in in names.items() if getattr(columns, name) is None}
    )
    sides = [
        SideFile(
            owner=owner,
            path=path,
            features=schema.stored(owner),
            header=None if headers.get(owner) is None else tuple(headers[owner] or ()),
            key=getattr(merged, owner),
            time_unit=time_unit,
            bad_lines=bad_lines,
            keeps_all=owner in keeps_all,
        )
        for owner in _SIDES
        if (path := files.get(owner)) is not None
    ]
    roles = ("user", "item", "time", "action") if usual else ("user", "item", "time")
    return SchemaInput(
        columns=merged,
        roles=roles,
        required=tuple(name for name in ("time", "action") if name in schema and name in roles),
        features=tuple(each for each in schema.columns() if not (usual and each.name == "action")),
        sides=tuple(sides),
        tables={each.name: each.table_name or each.name for each in schema if each.raw_ids},
    )


def _check_files(schema: Schema | None, files: Mapping[str, Path | None]) -> None:
    """Features need the file of their owner, and a file features, and must be there; all is told at once."""
    problems = []
    for owner in _SIDES:
        path, features = files.get(owner), () if schema is None else schema.stored(owner)
        if path is None and features:
            problems.append(
                f"{', '.join(each.name for each in features)}: of {owner}, and there is no file of {owner}s "
                f"(`--{owner}s FILE`); a column of the events is of event"
            )
        if path is not None and not features:
            problems.append(
                f"--{owner}s {path}: "
                + ("there is no schema (`--schema FILE`)" if schema is None else f"no feature is of {owner}")
            )
        if path is not None and not path.exists():
            problems.append(f"--{owner}s {path}: there is no such file")
        elif path is not None:
            check_input(path, owner)
    if problems:
        raise DataError("The schema and the files do not fit:\n  - " + "\n  - ".join(problems))
