"""Raw input read to its end, sorted by user and time; read again where its ids turn out to be of another kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from freescale.data.columns.ids import ID_KINDS, ID_ROLES, IdKind, IdKinds, OtherIdsError
from freescale.data.columns.values import ValueReader
from freescale.data.event_sorter import EventSorter
from freescale.data.raw_format import Reading
from freescale.data.raw_input import read_events
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
    """

    events: EventSorter
    words: IdWords
    id_kinds: IdKinds
    remarks: tuple[str, ...]
    values: ValueReader


def read_sorted(
    source: Path,
    kind: str,
    reading: Reading,
    *,
    asked: IdKinds,
    spill: Path,
    report: Callable[[float], None],
) -> SortedInput:
    """All events of the input.

    Args:
        source: the raw input.
        kind: its format.
        reading: how it is read; its memory is shared by events and words.
        asked: kinds of ids that the user has named; others are found out.
        spill: folder for what does not fit into memory.
        report: called with the fraction that has been read.
    """
    kinds: dict[str, IdKind] = {role: asked.get(role, "int64") for role in ID_ROLES}
    remarks: dict[str, str] = {}
    while True:
        num_words = sum(kind == "text" for kind in kinds.values())
        share = reading.memory // (2 + num_words)
        events = EventSorter(spill, reading.memory - num_words * share)
        words = IdWords(spill.with_name("spilled-words"), share, kinds)
        # From the beginning: what was counted and learnt so far is void.
        values = reading.values.again(id_kinds=kinds, asked=asked)
        try:
            for chunk, fraction in read_events(source, kind, replace(reading, values=values)):
                events.add(words.take(chunk))
                report(fraction)
            return SortedInput(events, words, kinds, tuple(remarks.values()), values)
        except OtherIdsError as found:
            if found.role in asked:
                raise _not_as_asked(found, asked[found.role]) from None
            kinds[found.role] = found.kind
            remarks[found.role] = _remark(found)
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


def _not_as_asked(found: OtherIdsError, asked: IdKind) -> DataError:
    return DataError(
        f"{found.place}: the {found.role} is no {asked} id",
        got=repr(found.value),
        allowed="whole numbers" + (" from 0 to 2^64 - 1" if asked == "uint64" else " of 64 bits"),
        next_step=f"correct the input, or read the ids as {found.kind} (`--{found.role}-ids {found.kind}`)",
    )
