"""Values of raw columns as checked numbers, and the error of the first that is none."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.actions import read_actions
from freescale.data.columns.arrow import is_text
from freescale.data.columns.ids import IdKinds, OtherIdsError, read_ids
from freescale.data.columns.roles import ROLES
from freescale.data.columns.times import read_times
from freescale.data.event_columns import Events
from freescale.data.excerpt import excerpt
from freescale.errors import DataError

# From the number of a value to its place in the input and the text around it.
Locate = Callable[[int], tuple[str, str]]

_BAD_VALUE = (ValueError, pa.ArrowException)


def checked_events(
    raw: dict[str, Any], locate: Locate | None, id_kinds: IdKinds = MappingProxyType({})
) -> Events:
    """Checked numbers of an Arrow array a role; without `locate` a bad value is a plain ValueError.

    Raises:
        OtherIdsError: ids are of another kind than `id_kinds` says.
    """
    events: Events = {}
    for name, column in raw.items():
        try:
            events.update(_numbers(name, column, id_kinds))
        except OtherIdsError as found:
            raise found.at(name, locate(found.index)[0] if locate else "the input") from None
        except _BAD_VALUE:
            if locate is None:
                raise
            raise _bad_value(name, column, locate, id_kinds) from None
    return events


def _bad_value(name: str, column: Any, locate: Locate, id_kinds: IdKinds) -> DataError:
    """The error of the first bad value, found by halving."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            _numbers(name, column.slice(low, middle - low), id_kinds)
            low = middle
        except OtherIdsError:
            low = middle  # ids, though of another kind: the bad value stands behind them
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


def _numbers(name: str, column: Any, id_kinds: IdKinds) -> Events:
    """The column as numbers of its role, or a ValueError."""
    if column.null_count:
        raise ValueError("missing value")
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        column = pc.utf8_trim_whitespace(column)
    if name == "time":
        return read_times(column)
    if name == "action":
        return {name: read_actions(column)}
    return read_ids(name, column, id_kinds.get(name, "int64"))
