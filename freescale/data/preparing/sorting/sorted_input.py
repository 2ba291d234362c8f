"""Raw input read to its end, sorted by user and time; read again where its ids turn out to be of another kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from freescale.data.columns.ids import ID_KINDS, ID_ROLES, IdKind, IdKinds, OtherIdsError
from freescale.data.columns.values import ValueReader
from freescale.data.preparing.reading.raw_format import Reading
from freescale.data.preparing.reading.raw_input import read_events
from freescale.data.preparing.reading.side_table import SideFile, SideTable, read_side
from freescale.data.preparing.sorting.event_sorter import EventSorter
from freescale.data.words.id_words import IdWords
from freescale.errors import DataError


@dataclass(frozen=True)
class SortedInput:
    """What was read.

    Args:
        events: sorted.
        words: of ids that are text.
        id_kinds: of users and items.
        remarks: why ids are not read as int64, a sentence a column.
        values: what read them, and knows what it took them for.
        sides: what the files of items and users say, by owner.
    """

    events: EventSorter
    words: IdWords
    id_kinds: IdKinds
    remarks: tuple[str, ...]
    values: ValueReader
    sides: Mapping[str, SideTable] = field(default_factory=dict)


def read_sorted(
    source: Path,
    kind: str,
    reading: Reading,
    *,
    asked: IdKinds,
    spill: Path,
    report: Callable[[float], None],
    sides: Sequence[SideFile] = (),
    tables: Mapping[str, str] = MappingProxyType({}),
) -> SortedInput:
    """All events of the input.

    Args:
        source: the raw input.
        kind: its format.
        reading: how it is read; its memory is shared by events and words.
        asked: kinds of ids that the user has named; others are found out.
        spill: folder for what does not fit into memory.
        report: called with the fraction that has been read.
        sides: files of items and users.
        tables: of features that are ids; those of one table are of one kind.
    """
    tables = {**{role: role for role in ID_ROLES}, **tables}
    by_table: dict[str, IdKind] = {table: asked.get(table, "int64") for table in tables.values()}
    remarks: dict[str, str] = {}
    while True:
        kinds: dict[str, IdKind] = {role: by_table[table] for role, table in tables.items()}
        num_words = sum(kind == "text" for kind in by_table.values())
        share = reading.memory // (2 + num_words)
        events = EventSorter(spill, reading.memory - num_words * share)
        words = IdWords(spill.with_name("spilled-words"), share, kinds, tables)
        # From the beginning: what was counted and learnt so far is void.
        values = reading.values.again(id_kinds=kinds, asked=asked)
        try:
            known: dict[str, SideTable] = {
                side.owner: read_side(side, kinds=kinds, words=words, memory=reading.memory) for side in sides
            }
            for chunk, fraction in read_events(source, kind, replace(reading, values=values)):
                events.add(words.take(chunk))
                report(fraction)
            return SortedInput(events, words, kinds, tuple(remarks.values()), values, known)
        except OtherIdsError as first:
            for found in (first, *first.others):
                table = tables[found.role]
                if table in asked:
                    raise _not_as_asked(found, table, asked[table]) from None
                by_table[table] = found.kind
                remarks[table] = _remark(found)
            for folder in (spill, spill.with_name("spilled-words")):
                shutil.rmtree(folder, ignore_errors=True)


def check_id_kinds(kinds: IdKinds) -> None:
    """Refuse kinds of ids that there are not."""
    for role, kind in kinds.items():
        if role not in ID_ROLES or kind not in ID_KINDS:
            raise DataError(
                f"Ids of the {role} cannot be of this kind",
                got=repr(kind),
                allowed=f"{', '.join(ID_KINDS)}, for {' and '.join(ID_ROLES)}",
            )


def _remark(found: OtherIdsError) -> str:
    what = "text" if found.kind == "text" else "unsigned 64-bit numbers"
    return f"{found.role} ids are {what}: {found.place} has {found.value!r}"


def _not_as_asked(found: OtherIdsError, table: str, asked: IdKind) -> DataError:
    return DataError(
        f"{found.place}: the {found.role} is no {asked} id",
        got=repr(found.value),
        allowed="whole numbers" + (" from 0 to 2^64 - 1" if asked == "uint64" else " of 64 bits"),
        next_step=f"correct the input, or read the ids as {found.kind} (`--{table}-ids {found.kind}`)",
    )
