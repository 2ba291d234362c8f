"""Turns raw interactions into a FreeScale data set: one sorted history a user, in Parquet, in bounded memory.

The input is read in chunks. Events that outgrow the memory budget are spilled as runs sorted by user and time
and merged back one range of users at a time. So users come out in ascending order, and the files are the same
whatever the budget. Beyond `memory_mb` only some bytes for every user and every item are held.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from freescale.data.columns.bad_lines import STOP
from freescale.data.columns.ids import IdKind, IdKinds
from freescale.data.columns.roles import ColumnNames
from freescale.data.preparing.preparation_checks import io_problem
from freescale.data.preparing.preparation_request import Request, checked_request
from freescale.data.preparing.reading.raw_input import AUTO, check_input
from freescale.data.preparing.sorted_histories import Progress, Written, write_sorted
from freescale.data.preparing.sorting.duplicates import KEEP
from freescale.data.preparing.writing.feature_writer import LACKING, NEW_ITEMS
from freescale.data.preparing.writing.grouped_index import Index, index_input
from freescale.data.schema.feature import Schema
from freescale.data.stored.item_texts import write_texts
from freescale.data.stored.storage import copy_all

__all__ = ["ColumnNames", "DatasetSummary", "Progress", "prepare"]

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
    duplicates: str = KEEP,
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
        duplicates: "keep" events that have user, item, time and action of one before, or "drop" them; they are counted.
            In Parquet that is read where it is, nobody looks for them.
        id_kinds: "int64", "uint64" or "text" for "user" and "item"; found out where they are not named.
        rewrite: copy histories also where Parquet that is grouped by user could be read as it is.
        overwrite: replace an existing data set.
        progress: called with the fraction done and what is being done.
    """
    request = checked_request(
        input_path,
        out_dir,
        format=format,
        columns=columns,
        separator=separator,
        header=header,
        time_unit=time_unit,
        actions=actions,
        bad_lines=bad_lines,
        min_events=min_events,
        memory_mb=memory_mb,
        name=name,
        texts=texts,
        schema=schema,
        items=items,
        users=users,
        item_header=item_header,
        user_header=user_header,
        lacking=lacking,
        new_items=new_items,
        duplicates=duplicates,
        id_kinds=id_kinds,
        rewrite=rewrite,
        overwrite=overwrite,
    )
    return _prepared(request, progress or (lambda fraction, message: None))


def _prepared(request: Request, report: Progress) -> DatasetSummary:
    out = request.out
    work = out.with_name(f"{out.name}.tmp-{os.getpid()}-{secrets.token_hex(3)}")
    try:
        work.mkdir(parents=True)
        request = _brought_here(request, work)
        kind, decided = request.kind()
        index = _indexed(request, work, kind)
        if index.manifest is None:
            written = write_sorted(request, work, kind, remarks=index.remarks, report=report)
        else:
            written = Written(index.manifest)
        num_texts = _published(request, work, item_kind=written.item_kind)
    except OSError as error:
        raise io_problem(error, out) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _summary(out, written.manifest, decided, num_texts, num_skipped=written.num_skipped)


def _brought_here(request: Request, work: Path) -> Request:
    if request.address is None:
        return request
    source = copy_all(request.address, work / "raw")
    check_input(source)
    return replace(request, source=source)


def _indexed(request: Request, work: Path, kind: str) -> Index:
    """Histories where they are, if they can be read there."""
    return index_input(
        request.source,
        work,
        root=request.address,
        columns=request.asked.columns,
        min_events=request.min_events,
        name=request.name,
        wanted=kind == "parquet" and request.as_is and "text" not in request.id_kinds.values(),
    )


def _published(request: Request, work: Path, *, item_kind: IdKind) -> int | None:
    """Write the texts, and give the finished folder its name; the number of items with texts."""
    num_texts = None
    if request.texts is not None:
        num_texts = write_texts(work, request.texts, name=request.texts_name, kind=item_kind)
    for spilled in ("spill", "spilled-words", "raw"):
        shutil.rmtree(work / spilled, ignore_errors=True)
    _publish(work, request.out)
    return num_texts


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
