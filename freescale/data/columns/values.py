"""Values of raw columns as checked numbers, and the error of the first that is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.actions import read_actions
from freescale.data.columns.arrow import is_text
from freescale.data.columns.ids import read_ids
from freescale.data.columns.roles import ROLES
from freescale.data.columns.times import read_times
from freescale.data.event_columns import Events
from freescale.data.excerpt import excerpt
from freescale.errors import DataError

# From the number of a value to its place in the input and the text around it.
Locate = Callable[[int], tuple[str, str]]

_BAD_VALUE = (ValueError, pa.ArrowException)


def checked_events(raw: dict[str, Any], locate: Locate | None) -> Events:
    """Checked numbers of an Arrow array a role; without `locate` a bad value is a plain ValueError."""
    events: Events = {}
    for name, column in raw.items():
        try:
            events.update(_numbers(name, column))
        except _BAD_VALUE:
            if locate is None:
                raise
            raise _bad_value(name, column, locate) from None
    return events


def _bad_value(name: str, column: Any, locate: Locate) -> DataError:
    """The error of the first bad value, found by halving."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            _numbers(name, column.slice(low, middle - low))
            low = middle
        except _BAD_VALUE:
            high = middle
    value = repr(excerpt(str(column[low]))) if column[low].is_valid else "nothing"
    where, text = locate(low)
    return DataError(
        f"{where}: the {name} is not one of the numbers allowed",
        got=f"{value} in {text}",
        allowed=ROLES[name].allowed,
        next_step=ROLES[name].remedy,
    )


def _numbers(name: str, column: Any) -> Events:
    """The column as numbers of its role, or a ValueError."""
    if column.null_count:
        raise ValueError("missing value")
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        column = pc.utf8_trim_whitespace(column)
    if name == "time":
        return read_times(column)
    return {name: read_actions(column) if name == "action" else read_ids(column)}
