"""Rows of named columns, as Parquet and JSON lines have them: one event a row, or one user a row with lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.split_text import is_listed
from freescale.data.columns.values import ValueReader
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.source import IntArray
from freescale.errors import DataError


def events_of_rows(values: ValueReader, raw: dict[str, Any], place: Callable[[int], str] | None) -> Events:
    """Rows of one event as they are; rows of lists laid end to end.

    Args:
        values: reads the columns.
        raw: an Arrow array a role.
        place: where a row is, for messages; None makes a bad value a plain ValueError.
    """
    where = place or "row {}".format
    single_events = "item" not in raw or not is_listed(raw["item"].type)
    # Of one event a row, a feature may be a list itself.
    free = values.features if single_events else ()
    listed = [role for role, column in raw.items() if is_listed(column.type) and role not in free]
    if not listed:
        return values.events(raw, place and (lambda row: (place(row), "that row")))
    if sorted(listed) != sorted(set(raw) - {"user"}):
        single = [role for role in raw if role not in ("user", *listed)]
        raise DataError(
            f"{where(0)}: lists and single values are mixed",
            got=f"lists in {', '.join(listed)}"
            + (f", single values in {', '.join(single)}" if single else ""),
            allowed="one event a row, or one user a row and a list in every other column",
            next_step="name other columns, or leave one out (`--time ''`, `--action ''`)",
        )
    counts = _list_lengths(raw["item"])
    for role in listed:
        others = _list_lengths(raw[role])
        if (others != counts).any():
            row = int(np.flatnonzero(others != counts)[0])
            raise DataError(
                f"{where(row)}: lists of different lengths",
                got=f"{counts[row]} in item, {others[row]} in {role}",
                allowed="as many of each as there are events",
                next_step=f"correct the row, or leave the column out (`--{role} ''`)",
            )
    ends = np.cumsum(counts)
    flat = {"user": raw["user"].take(pa.array(np.repeat(np.arange(len(counts)), counts)))}
    flat.update({role: raw[role].flatten() for role in listed})
    if place is None:
        return values.events(flat, None)
    return values.events(flat, lambda event: (place(int(np.searchsorted(ends, event, "right"))), "a list"))


def _list_lengths(lists: Any) -> IntArray:
    return pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
