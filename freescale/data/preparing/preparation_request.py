"""What `prepare` was asked for, checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freescale.data.columns.ids import IdKinds
from freescale.data.columns.roles import ColumnNames
from freescale.data.columns.times import TIME_UNITS
from freescale.data.columns.values import ValueReader
from freescale.data.preparing.preparation_checks import (
    check_header,
    check_options,
    check_target,
    numbered_actions,
)
from freescale.data.preparing.reading.raw_input import AUTO, check_input, find_format
from freescale.data.preparing.reading.schema_input import SchemaInput, schema_input
from freescale.data.preparing.sorting.duplicates import DROP, DUPLICATES
from freescale.data.preparing.sorting.sorted_input import check_id_kinds
from freescale.data.preparing.writing.feature_writer import KEEP, LACKING, NEW_ITEMS
from freescale.data.schema.feature import Schema
from freescale.data.schema.reading import schema_from
from freescale.data.stored.item_texts import read_raw_texts
from freescale.data.stored.manifest import TIME_UNIT
from freescale.data.stored.storage import is_address, local_path
from freescale.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Request:
    """A preparation that may begin.

    Args:
        source: the raw input, as it is or will be on this machine.
        address: where it is, if that is elsewhere.
        out: folder to create.
        name: of the data set.
        format: of the input, or "auto".
        separator: between fields, where it is not found by itself.
        fields: their names, where the input has no header line.
        asked: what the schema means for the input.
        schema: the features to keep, or None.
        values: reads the columns of events.
        id_kinds: of users and items, where they are named.
        lacking: what becomes of owners that their files lack.
        new_items: what becomes of items that no event names.
        duplicates: what becomes of events that equal one before.
        min_events: of a user that is kept.
        memory: bytes for sorting.
        texts: of items, read.
        texts_name: of their file, for people.
        as_is: histories may be read where they are.
    """

    source: Path
    address: str | None
    out: Path
    name: str
    format: str
    separator: str | None
    fields: tuple[str, ...] | None
    asked: SchemaInput
    schema: Schema | None
    values: ValueReader
    id_kinds: IdKinds
    lacking: str
    new_items: str
    duplicates: str
    min_events: int
    memory: int
    texts: dict[str, str] | None
    texts_name: str
    as_is: bool

    def kind(self) -> tuple[str, str]:
        """The format of the input, and how that is known."""
        if self.format == AUTO:
            return find_format(self.source, self.separator, self.fields)
        return self.format, "as asked for"


def checked_request(
    input_path: str | Path,
    out_dir: str | Path,
    *,
    format: str,
    columns: ColumnNames,
    separator: str | None,
    header: Sequence[str] | None,
    time_unit: str,
    actions: Sequence[str] | Mapping[str, float] | None,
    bad_lines: str,
    min_events: int,
    memory_mb: float,
    name: str | None,
    texts: str | Path | None,
    schema: Schema | Mapping[str, Any] | str | Path | None,
    items: str | Path | None,
    users: str | Path | None,
    item_header: Sequence[str] | None,
    user_header: Sequence[str] | None,
    lacking: str,
    new_items: str,
    duplicates: str,
    id_kinds: IdKinds,
    rewrite: bool,
    overwrite: bool,
) -> Request:
    """The arguments of `prepare`, or why it cannot begin."""
    source, out = local_path(input_path), local_path(out_dir).resolve()
    check_options(format, separator=separator, min_events=min_events, memory_mb=memory_mb)
    check_id_kinds(id_kinds)
    check_header(source, format, header)
    _check_words(time_unit=time_unit, lacking=lacking, new_items=new_items, duplicates=duplicates)
    known_schema = schema_from(schema)
    asked = schema_input(
        known_schema,
        columns=columns,
        files={"item": _path(items), "user": _path(users)},
        headers={"item": item_header, "user": user_header},
        time_unit=time_unit,
        bad_lines=bad_lines,
        keeps_all=("item",) if new_items == KEEP else (),
    )
    numbers = numbered_actions(actions)
    values = ValueReader(time_unit=time_unit, actions=numbers, bad_lines=bad_lines, features=asked.features)
    _check_places(input_path, out_dir)
    known_texts = None if texts is None else read_raw_texts(Path(texts))
    check_target(source, out, overwrite=overwrite)
    return Request(
        source=source,
        address=str(input_path) if is_address(input_path) else None,
        out=out,
        name=name or out.name,
        format=format,
        separator=separator,
        fields=None if header is None else tuple(header),
        asked=asked,
        schema=known_schema,
        values=values,
        id_kinds=id_kinds,
        lacking=lacking,
        new_items=new_items,
        duplicates=duplicates,
        min_events=min_events,
        memory=int(memory_mb * 2**20),
        texts=known_texts,
        texts_name=str(texts),
        as_is=not rewrite
        and duplicates != DROP
        and known_schema is None
        and actions is None
        and time_unit in (AUTO, TIME_UNIT),
    )


def _check_words(*, time_unit: str, lacking: str, new_items: str, duplicates: str) -> None:
    if time_unit not in TIME_UNITS:
        raise DataError("Unknown unit of times", got=time_unit, allowed=", ".join(TIME_UNITS))
    words = (
        ("lacking", lacking, LACKING),
        ("new_items", new_items, NEW_ITEMS),
        ("duplicates", duplicates, DUPLICATES),
    )
    for word, given, allowed in words:
        if given not in allowed:
            raise DataError(f"{word} is neither", got=given, allowed=", ".join(allowed))


def _check_places(input_path: str | Path, out_dir: str | Path) -> None:
    """Refuse to write elsewhere, and an input that is not here where it should be."""
    if is_address(out_dir):
        raise DataError(
            "prepare writes to this machine",
            got=out_dir,
            next_step="prepare into a folder here, and copy it there: data.path may be that address",
        )
    if not is_address(input_path):
        check_input(local_path(input_path))


def _path(given: str | Path | None) -> Path | None:
    if given is not None and is_address(given):
        raise DataError(
            "Files of items and users are read on this machine", got=given, next_step="copy it here"
        )
    return None if given is None else local_path(given)
