"""The columns of raw input: which plays which part, and its values as checked numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.event_columns import MAX_INT64, Events
from freescale.data.excerpt import excerpt
from freescale.errors import DataError, nearest

# From the number of a value to its place in the input and the text around it.
Locate = Callable[[int], tuple[str, str]]


@dataclass(frozen=True)
class ColumnNames:
    """Which column of csv, inter or parquet input plays which part.

    None looks for usual names such as user_id, itemId, timestamp, rating; "" leaves an optional column out.
    """

    user: str | None = None
    item: str | None = None
    time: str | None = None
    action: str | None = None


@dataclass(frozen=True)
class _Role:
    """A part that a column can play."""

    usual_names: tuple[str, ...]
    allowed: str
    remedy: str
    optional: bool


_ROLES = {
    "user": _Role(
        ("user", "userid", "uid"),
        allowed=f"whole numbers from 0 to {MAX_INT64}",
        remedy="correct the input, or number the users from 0 first",
        optional=False,
    ),
    "item": _Role(
        ("item", "itemid", "iid", "movieid", "productid", "asin", "parentasin"),
        allowed=f"whole numbers from 0 to {MAX_INT64}",
        remedy="correct the input, or number the items from 0 first",
        optional=False,
    ),
    "time": _Role(
        ("time", "timestamp", "ts", "unixreviewtime"),
        allowed="finite numbers, such as seconds since 1970",
        remedy="correct the input, or set the time column to '' to keep the order of the file",
        optional=True,
    ),
    "action": _Role(
        ("action", "rating"),
        allowed="finite numbers, such as a rating",
        remedy="correct the input, or set the action column to '' to leave it out",
        optional=True,
    ),
}
_BAD_VALUE = (ValueError, pa.ArrowException)


def choose_columns(path: Path, header: list[str], columns: ColumnNames) -> dict[str, int]:
    """Where in the header each part is; times and actions are optional unless named."""
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in header]
    chosen: dict[str, int] = {}
    for name, role in _ROLES.items():
        wanted: str | None = getattr(columns, name)
        usual = [plain.index(guess) for guess in role.usual_names if guess in plain]
        if wanted:
            if wanted not in header:
                raise _no_column(path, name, wanted, header)
            chosen[name] = header.index(wanted)
        elif wanted is None and usual:
            chosen[name] = usual[0]
        elif not role.optional:
            raise _no_column(path, name, None, header)
    if len(set(chosen.values())) < len(chosen):
        raise DataError(
            f"One column of {path} cannot play two parts",
            got=", ".join(f"{name}: {header[place]!r}" for name, place in chosen.items()),
            allowed=_columns_there(header),
        )
    return chosen


def _no_column(path: Path, name: str, wanted: str | None, header: list[str]) -> DataError:
    guess = nearest(wanted or name, header)
    return DataError(
        f"{path} has no column for the {name}",
        got=repr(wanted) if wanted else f"none of the usual names ({', '.join(_ROLES[name].usual_names)})",
        allowed=_columns_there(header),
        next_step=f"name the {name} column (`--{name}`)" + (f"; did you mean {guess!r}?" if guess else ""),
    )


def _columns_there(header: list[str]) -> str:
    return f"the columns there are: {excerpt(', '.join(header))}"


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
        allowed=_ROLES[name].allowed,
        next_step=_ROLES[name].remedy,
    )


def _numbers(name: str, column: Any) -> Events:
    """The column as numbers of its role, or a ValueError."""
    if column.null_count:
        raise ValueError("missing value")
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_text(column.type):
        column = pc.utf8_trim_whitespace(column)
    if name == "time":
        return _times(column)
    if name == "action":
        with np.errstate(over="ignore"):
            actions = _cast(column, pa.float64(), safe=False).astype(np.float32)
        if not np.isfinite(actions).all():
            raise ValueError("not finite")
        return {"action": actions}
    ids = _cast(column, pa.int64())
    if len(ids) and ids.min() < 0:
        raise ValueError("negative")
    return {name: ids}


def _times(column: Any) -> Events:
    """Whole times (dates in the unit of the column), and what rounding took away if that is not nothing.

    Whole numbers never go through a float, which would merge times in nanoseconds.
    """
    kind = column.type
    if pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        return {"time": _cast(column, pa.int64())}
    whole: Any = 0
    if _is_text(kind):
        is_whole = pc.match_substring_regex(column, r"^-?\d+$")
        whole = _cast(pc.if_else(is_whole, column, "0"), pa.int64())
        column = pc.if_else(is_whole, "0", column)
    exact = _cast(column, pa.float64())
    if not (np.abs(exact) < 2.0**63).all():
        raise ValueError("not finite or too large")
    rounded = np.rint(exact)
    times: Events = {"time": whole + rounded.astype(np.int64)}
    if (exact != rounded).any():
        times["fraction"] = exact - rounded
    return times


def _cast(column: Any, kind: Any, *, safe: bool = True) -> npt.NDArray[Any]:
    return column.cast(kind, safe=safe).to_numpy(zero_copy_only=False)


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)
