"""Turns raw interactions into a FreeScale data set: one sorted history a user, in Parquet, in bounded memory.

The input is read in chunks. Events that outgrow the memory budget are spilled as runs sorted by user and time
and merged back one range of users at a time. So users come out in ascending order, and the files are the same
whatever the budget. Beyond `memory_mb` only some bytes for every user and every item are held.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from freescale.data.columns.bad_lines import STOP
from freescale.data.columns.ids import IdKind, IdKinds
from freescale.data.columns.roles import ColumnNames
from freescale.data.columns.times import TIME_UNITS
from freescale.data.columns.values import ValueReader
from freescale.data.preparing.dataset_writer import DatasetWriter
from freescale.data.preparing.event_columns import Events
from freescale.data.preparing.feature_writer import KEEP, LACKING, NEW_ITEMS, FeatureWriter
from freescale.data.preparing.grouped_index import index_input
from freescale.data.preparing.preparation_checks import (
    check_header,
    check_options,
    check_target,
    io_problem,
    numbered_actions,
)
from freescale.data.preparing.raw_format import Reading
from freescale.data.preparing.raw_input import AUTO, check_input, files_not_read, find_format
from freescale.data.preparing.schema_input import schema_input
from freescale.data.preparing.side_table import LIST_MARKS
from freescale.data.preparing.sorted_input import check_id_kinds, read_sorted
from freescale.data.schema.feature import Schema
from freescale.data.schema.reading import schema_from
from freescale.data.stored.item_texts import read_raw_texts, write_texts
from freescale.data.stored.manifest import TIME_UNIT
from freescale.data.stored.storage import copy_all, is_address, local_path
from freescale.errors import DataError

__all__ = ["ColumnNames", "DatasetSummary", "Progress", "prepare"]

Progress = Callable[[float, str], None]

_READING_SHARE = 0.6  # of the whole time, measured on text input
_USUAL_NAMES = ColumnNames()


@dataclass(frozen=True)
class DatasetSummary:
    """What `prepare` wrote, and what it took its input for.

    Args:
        path: the folder.
        name: of the data set.
        source_format: what the input was read as.
        decided: how that was found.
        num_users: histories.
        num_events: events of all histories.
        num_items: different items.
        max_item: the largest id of one.
        features: columns that every event has.
        dropped_users: users with too few events.
        num_shards: files of histories.
        num_texts: items that have texts; None without texts.
        taken: a line each on which column was taken for what, what was ignored, and what was skipped.
        num_skipped: lines that could not be used.
        actions: number of each action that is a word; None where actions are numbers.
    """

    path: Path
    name: str
    source_format: str
    decided: str
    num_users: int
    num_events: int
    num_items: int
    max_item: int
    features: tuple[str, ...]
    dropped_users: int
    num_shards: int
    num_texts: int | None = None
    taken: tuple[str, ...] = ()
    num_skipped: int = 0
    actions: Mapping[str, float] | None = None


def prepare(
    input_path: str | Path,
    out_dir: str | Path,
    *,
    format: str = AUTO,
    columns: ColumnNames = _USUAL_NAMES,
    separator: str | None = None,
    header: Sequence[str] | None = None,
    time_unit: str = AUTO,
    actions: Sequence[str] | Mapping[str, float] | None = None,
    bad_lines: str = STOP,
    min_events: int = 3,
    memory_mb: float = 512,
    name: str | None = None,
    texts: str | Path | None = None,
    schema: Schema | Mapping[str, Any] | str | Path | None = None,
    items: str | Path | None = None,
    users: str | Path | None = None,
    item_header: Sequence[str] | None = None,
    user_header: Sequence[str] | None = None,
    lacking: str = LACKING[0],
    new_items: str = NEW_ITEMS[0],
    id_kinds: IdKinds = MappingProxyType({}),
    rewrite: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> DatasetSummary:
    """Write the data set of these interactions into a new folder, or nothing at all.

    Events of a user are ordered by time; equal times, and data without times, keep the order of the input.
    Times are stored as whole seconds since 1970 in UTC; fractions of a second only order events.

    Args:
        input_path: a file, or for csv, jsonl and parquet a folder of files that are read in name order; may be an
            address (s3://...).
        out_dir: folder to create; an existing data set there is replaced only with `overwrite`.
        format: one of `format_names()`; "auto" looks at the name and the first lines.
        columns: column names of input that has a header.
        separator: what stands between fields of csv, pairs or sequences, where it is not found by itself.
        header: names of the fields of csv without a header line, in their order; "_" for one nobody needs.
        time_unit: of times that are plain numbers: "s", "ms", "us", "ns"; "auto" tells it from their size.
        actions: numbers of actions that are words, or the words in the order of their numbers from 0; None
            numbers them by frequency, the most frequent 0.
        bad_lines: "stop" at the first line that cannot be used, or "skip" such lines and count them.
        min_events: users with fewer events are dropped; three are needed for train, validation and test.
        memory_mb: memory for sorting events, in MiB; reading and writing take some 100 MiB by themselves.
        name: name of the data set; that of the folder unless given.
        texts: titles, categories, ... of the items, to keep beside the histories; see `item_texts`.
        schema: the features to keep: words by name, a YAML file with a section `features`, or read already.
        items: file with the features of items, of any format with named columns.
        users: the same of users.
        item_header: names of the fields of csv of items without a header line.
        user_header: the same of users.
        lacking: "stop" where these files lack an item or user of the events, or "none": its features are missing.
        new_items: "leave" out items of their file that no event names, or "keep" them: models recommend them by their
            features.
        id_kinds: "int64", "uint64" or "text" for "user" and "item"; found out where they are not named.
        rewrite: copy histories also where Parquet that is grouped by user could be read as it is.
        overwrite: replace an existing data set.
        progress: called with the fraction done and what is being done.
    """
    source, out = local_path(input_path), local_path(out_dir).resolve()
    check_options(format, separator=separator, min_events=min_events, memory_mb=memory_mb)
    check_id_kinds(id_kinds)
    check_header(source, format, header)
    if time_unit not in TIME_UNITS:
        raise DataError("Unknown unit of times", got=time_unit, allowed=", ".join(TIME_UNITS))
    for word, given, allowed in (("lacking", lacking, LACKING), ("new_items", new_items, NEW_ITEMS)):
        if given not in allowed:
            raise DataError(f"{word} is neither", got=given, allowed=", ".join(allowed))
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
    columns = asked.columns
    values = ValueReader(
        time_unit=time_unit,
        actions=numbered_actions(actions),
        bad_lines=bad_lines,
        features=asked.features,
    )
    if is_address(out_dir):
        raise DataError(
            "prepare writes to this machine",
            got=out_dir,
            next_step="prepare into a folder here, and copy it there: data.path may be that address",
        )
    away = is_address(input_path)
    if not away:
        check_input(source)
    known = None if texts is None else read_raw_texts(Path(texts))
    check_target(source, out, overwrite=overwrite)
    report = progress or (lambda fraction, message: None)
    memory = int(memory_mb * 2**20)
    work = out.with_name(f"{out.name}.tmp-{os.getpid()}-{secrets.token_hex(3)}")
    writer: DatasetWriter | None = None
    try:
        work.mkdir(parents=True)
        if away:
            source = copy_all(str(input_path), work / "raw")
            check_input(source)
        fields = None if header is None else tuple(header)
        kind, decided = find_format(source, separator, fields) if format == AUTO else (format, "as asked for")
        as_is = not rewrite and known_schema is None and actions is None and time_unit in (AUTO, TIME_UNIT)
        index = index_input(
            source,
            work,
            root=str(input_path) if away else None,
            columns=columns,
            min_events=min_events,
            name=name or out.name,
            wanted=kind == "parquet" and as_is and "text" not in id_kinds.values(),
        )
        manifest, num_skipped = index.manifest, 0
        item_kind: IdKind = "int64"
        if manifest is None:
            reading = Reading(
                columns=columns,
                separator=separator,
                header=fields,
                memory=memory,
                values=values.again(marks=LIST_MARKS.get(kind)),
                roles=asked.roles,
                required=asked.required,
            )
            found = read_sorted(
                source,
                kind,
                reading,
                asked=id_kinds,
                spill=work / "spill",
                report=lambda fraction: report(fraction * _READING_SHARE, f"reading {source.name}"),
                sides=asked.sides,
                tables=asked.tables,
            )
            values = found.values
            extra = (
                None
                if known_schema is None
                else FeatureWriter(
                    known_schema,
                    sides=found.sides,
                    kinds=found.id_kinds,
                    lacking=lacking,
                    new_items=new_items,
                )
            )
            writer = DatasetWriter(
                work, found.events.features, min_events, id_kinds=found.id_kinds, extra=extra
            )
            for events, fraction in found.events.blocks():
                writer.add(_with_numbers(events, values))
                report(_READING_SHARE + fraction * (1 - _READING_SHARE), f"writing {out.name}")
            sides = [line for side in found.sides.values() for line in side.remarks]
            said = [*sides, *index.remarks, *found.remarks, *_said_of_others(source, kind)]
            about = {**_about(found.events.features, values), "taken": [*values.describe(), *said]}
            manifest = writer.finish(name or out.name, kind, words=found.words, about=about)
            item_kind, num_skipped = found.id_kinds["item"], values.bad_lines.num_skipped
        num_texts = None if known is None else write_texts(work, known, name=str(texts), kind=item_kind)
        for spilled in ("spill", "spilled-words", "raw"):
            shutil.rmtree(work / spilled, ignore_errors=True)
        _publish(work, out)
    except OSError as error:
        raise io_problem(error, out) from error
    finally:
        if writer is not None:
            writer.abort()
        shutil.rmtree(work, ignore_errors=True)
    return _summary(out, manifest, decided, num_texts, num_skipped=num_skipped)


def _path(given: str | Path | None) -> Path | None:
    if given is not None and is_address(given):
        raise DataError(
            "Files of items and users are read on this machine", got=given, next_step="copy it here"
        )
    return None if given is None else local_path(given)


def _with_numbers(events: Events, values: ValueReader) -> Events:
    """The same events, words of actions as their numbers, which are known once all events are read."""
    if "action" not in events or "action" in values.features:
        return events
    return {**events, "action": values.actions.numbered(events["action"])}


def _about(features: Sequence[str], values: ValueReader) -> dict[str, Any]:
    """What the manifest says of the values."""
    about: dict[str, Any] = {"time_unit": TIME_UNIT} if "time" in features else {}
    usual = "action" in features and "action" not in values.features
    vocabulary = values.actions.vocabulary() if usual else None
    return about if vocabulary is None else {**about, "actions": vocabulary}


def _said_of_others(source: Path, kind: str) -> list[str]:
    others = files_not_read(source, kind)
    if not others:
        return []
    more = f" and {len(others) - 5:,} more" if len(others) > 5 else ""
    return [f"files not read: {', '.join(others[:5])}{more}"]


def _summary(
    out: Path, manifest: dict[str, Any], decided: str, num_texts: int | None, *, num_skipped: int
) -> DatasetSummary:
    counts = {
        key: manifest[key] for key in ("num_users", "num_events", "num_items", "max_item", "dropped_users")
    }
    return DatasetSummary(
        path=out,
        name=manifest["name"],
        source_format=manifest["source_format"],
        decided=decided,
        features=tuple(manifest["features"]),
        num_shards=len(manifest["shards"]),
        num_texts=num_texts,
        actions=manifest.get("actions"),
        taken=tuple(manifest["taken"]),
        num_skipped=num_skipped,
        **counts,
    )


def _publish(work: Path, out: Path) -> None:
    """Give the finished folder its name; under that name there is never half a data set."""
    if not out.exists():
        work.rename(out)
        return
    old = work.with_name(f"{work.name}-old")
    out.rename(old)
    try:
        work.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
