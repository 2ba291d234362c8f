"""Histories written anew: events are read, sorted by user and time, and written with what is known of their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from freescale.data.columns.ids import IdKind
from freescale.data.columns.values import ValueReader
from freescale.data.preparing.preparation_request import Request
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.preparing.reading.raw_format import Reading
from freescale.data.preparing.reading.raw_input import files_not_read
from freescale.data.preparing.reading.side_table import LIST_MARKS
from freescale.data.preparing.sorting.duplicates import DROP, Duplicates
from freescale.data.preparing.sorting.sorted_input import SortedInput, read_sorted
from freescale.data.preparing.writing.dataset_writer import DatasetWriter
from freescale.data.preparing.writing.feature_writer import FeatureWriter
from freescale.data.stored.manifest import TIME_UNIT

Progress = Callable[[float, str], None]

_READING_SHARE = 0.6  # of the whole time, measured on text input


class Written(NamedTuple):
    """What stands in the folder: its manifest, which items it names by what, and lines that could not be used."""

    manifest: dict[str, Any]
    item_kind: IdKind = "int64"
    num_skipped: int = 0


def write_sorted(
    request: Request, work: Path, kind: str, *, remarks: Sequence[str], report: Progress
) -> Written:
    """Read and sort all events, and write them as histories."""
    found = _sorted_events(request, work, kind, report)
    values, features = found.values, found.events.features
    duplicates = Duplicates(drops=request.duplicates == DROP)
    writer = DatasetWriter(
        work,
        features,
        request.min_events,
        id_kinds=found.id_kinds,
        extra=_feature_writer(request, found),
    )
    try:
        for events, fraction in found.events.blocks():
            writer.add(duplicates.seen(_with_numbers(events, values)))
            report(_READING_SHARE + fraction * (1 - _READING_SHARE), f"writing {request.out.name}")
        sides = [line for side in found.sides.values() for line in side.remarks]
        said = [*sides, *remarks, *found.remarks, *_said_of_others(request.source, kind)]
        about = {**_about(features, values), "taken": [*values.describe(), *duplicates.describe(), *said]}
        manifest = writer.finish(request.name, kind, words=found.words, about=about)
    finally:
        writer.abort()
    return Written(manifest, found.id_kinds["item"], values.bad_lines.num_skipped)


def _sorted_events(request: Request, work: Path, kind: str, report: Progress) -> SortedInput:
    asked = request.asked
    reading = Reading(
        columns=asked.columns,
        separator=request.separator,
        header=request.fields,
        memory=request.memory,
        values=request.values.again(marks=LIST_MARKS.get(kind)),
        roles=asked.roles,
        required=asked.required,
    )
    return read_sorted(
        request.source,
        kind,
        reading,
        asked=request.id_kinds,
        spill=work / "spill",
        report=lambda fraction: report(fraction * _READING_SHARE, f"reading {request.source.name}"),
        sides=asked.sides,
        tables=asked.tables,
    )


def _feature_writer(request: Request, found: SortedInput) -> FeatureWriter | None:
    if request.schema is None:
        return None
    return FeatureWriter(
        request.schema,
        sides=found.sides,
        kinds=found.id_kinds,
        lacking=request.lacking,
        new_items=request.new_items,
    )


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
