"""Dates as text, or as digits such as 20240131, in nanoseconds since 1970."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.arrow import cast
from freescale.data.source import IntArray

ISO_DATES = "ISO dates such as 2024-01-31, 2024-01-31 12:00 or 2024-01-31T12:00:00.5+01:00, from 1678 to 2261"

_LOCAL, _ZONED = pa.timestamp("ns"), pa.timestamp("ns", tz="UTC")
# A zone stands behind a time of day: the last hyphen of 2024-01-31 is none.
_ZONE = r":\d\d(\.\d+)? ?(Z|[+-]\d\d(:?\d\d)?)$"
# Harmless ways to write the same, in the order they are taken back.
_OTHER_WAYS = (
    (r"^(\d{4})/(\d\d)/(\d\d)", r"\1-\2-\3"),
    (r"^(\d{4}-\d\d-\d\d)t", r"\1T"),
    (r",(\d+)", r".\1"),
    (r" ?(z|Z|UTC|GMT)$", "Z"),
    (r" ([+-]\d\d:?\d\d)$", r"\1"),
)
# Digits of a date -> what to divide by for the day alone.
_DAY_AT = {8: 1, 12: 10**4, 14: 10**6}


def nanoseconds_of_dates(column: Any) -> tuple[IntArray, bool]:
    """Nanoseconds since 1970 of ISO dates, and whether one was without a time zone, which is then UTC."""
    for kind in (_LOCAL, _ZONED):
        try:
            return cast(column.cast(kind), pa.int64()), kind == _LOCAL
        except pa.ArrowInvalid:
            continue
    for pattern, plain in _OTHER_WAYS:
        column = pc.replace_substring_regex(column, pattern, plain)
    zoned = pc.match_substring_regex(column, _ZONE)
    if not zoned.true_count:
        return cast(column.cast(_LOCAL), pa.int64()), True
    local = cast(pc.if_else(zoned, "1970-01-01", column).cast(_LOCAL), pa.int64())
    exact = cast(pc.if_else(zoned, column, "1970-01-01T00:00Z").cast(_ZONED), pa.int64())
    return local + exact, zoned.false_count > 0


def num_date_digits(numbers: npt.NDArray[Any]) -> int | None:
    """8, 12 or 14 where nearly all numbers are dates written 20240131, 202401311200 or 20240131120000."""
    for digits in _DAY_AT:
        if len(numbers) and _split(numbers, digits)[0].mean() >= 0.9:
            return digits
    return None


def seconds_of_digits(numbers: IntArray, digits: int) -> IntArray:
    """Seconds since 1970 of dates written as digits, or a ValueError."""
    valid, days, clock = _split(numbers, digits)
    if not valid.all():
        raise ValueError("not a date")
    return days * 86400 + clock // 10000 * 3600 + clock // 100 % 100 * 60 + clock % 100


def _split(numbers: npt.NDArray[Any], digits: int) -> tuple[npt.NDArray[np.bool_], IntArray, IntArray]:
    """Of numbers that may be dates: whether they are, days since 1970, and the time of day as hhmmss."""
    day_at = _DAY_AT[digits]
    inside = (numbers >= 19000101 * day_at) & (numbers < 21010101 * day_at) & (numbers == np.floor(numbers))
    whole = np.where(inside, numbers, 0).astype(np.int64)
    day, clock = whole // day_at, whole % day_at * (100 if digits == 12 else 1)
    months = ((day // 10000 - 1970) * 12 + day // 100 % 100 - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + (day % 100 - 1)
    month = day // 100 % 100
    valid = inside & (month >= 1) & (month <= 12) & (days.astype("datetime64[M]") == months)
    valid &= (clock // 10000 < 24) & (clock // 100 % 100 < 60) & (clock % 100 < 60)
    return valid, days.astype(np.int64), clock
