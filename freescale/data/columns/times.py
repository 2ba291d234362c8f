"""Times: seconds since 1970 in UTC, whatever the input has, and the fraction of a second that breaks ties."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.arrow import NUMBER, cast, is_text, without_nothing
from freescale.data.columns.dates import ISO_DATES, nanoseconds_of_dates, num_date_digits, seconds_of_digits
from freescale.data.preparing.reading.event_columns import Events

AUTO = "auto"
UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
TIME_UNITS = (AUTO, *UNITS)

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# A number of so many units lies between 1973 and 5138; smaller units are a thousand times as many.
_BANDS = {"s": (0, 10**11), "ms": (10**11, 10**14), "us": (10**14, 10**17), "ns": (10**17, 2**63)}
_DATES = "dates"
_LOOKED_AT = 4096
_DATE = r"^\d+[-/.]\d+[-/.]\d"
_WHOLE = r"^[+-]?\d+$"


class TimeReader:
    """Reads the times of one input. Their unit is found once, in the first values, and holds for all.

    Args:
        unit: of plain numbers: "s", "ms", "us", "ns", or "auto", which tells it from their size.
    """

    def __init__(self, unit: str = AUTO) -> None:
        self._asked = unit
        self._unit = None if unit == AUTO else unit
        self._digits: int | None = None
        self._dates_without_zone = False
        self._first: int | None = None
        self._last: int | None = None

    @property
    def allowed(self) -> str:
        """What a time must be, for messages."""
        if self._digits is not None:
            return f"dates of {self._digits} digits, as nearly all others are"
        if self._unit == _DATES:
            return f"{ISO_DATES}, as the others are"
        if self._unit is None:
            return f"numbers of seconds since 1970 (or of ms, us, ns), or {ISO_DATES}"
        as_others = ", as the others are" if self._asked == AUTO else ""
        return f"{UNITS[self._unit]} since 1970{as_others}"

    @property
    def remedy(self) -> str:
        """What helps against a time that is none."""
        unit = "" if self._unit == _DATES else "say the unit (`--time-unit`), "
        return f"correct the input, {unit}skip such lines (`--bad-lines skip`), or set `--time ''`: no times"

    def learn(self, column: Any) -> None:
        """Find out what the times of this input are, if that is not known; bad values do not matter."""
        kind = column.type
        if self._unit is not None or pa.types.is_temporal(kind):
            return
        column = without_nothing(column)
        if not len(column):
            return
        if is_text(kind):
            numbers = column.filter(pc.match_substring_regex(column, NUMBER))
            if len(numbers) <= pc.match_substring_regex(column, _DATE).true_count:
                self._unit = _DATES
                return
            column = numbers
        elif not _is_number(kind):
            return
        values = cast(column, pa.float64(), safe=False)
        values = values[np.isfinite(values)]
        if not len(values):
            return
        values = values[:: 1 + len(values) // _LOOKED_AT]
        self._digits = num_date_digits(values)
        size = np.median(np.abs(values))
        # The largest unit that fits, not the nearest one: nothing is in use that is off by a thousand.
        self._unit = "s" if self._digits else next((u for u, (_, end) in _BANDS.items() if size < end), "ns")

    def read(self, column: Any) -> Events:
        """Whole seconds, and their fractions if there are any; a ValueError where a value is no such time."""
        kind = column.type
        if pa.types.is_timestamp(kind):
            self._dates_without_zone |= kind.tz is None
            return _whole_and_fraction(cast(column, pa.int64()), _PER_SECOND[kind.unit])
        if pa.types.is_date(kind):
            return {"time": cast(column.cast(pa.date32()).cast(pa.int32()), pa.int64()) * 86400}
        if is_text(kind) and self._unit == _DATES:
            nanoseconds, without_zone = nanoseconds_of_dates(column)
            self._dates_without_zone |= without_zone
            return _whole_and_fraction(nanoseconds, 10**9)
        if pa.types.is_integer(kind):
            return self._read_whole(cast(column, pa.int64()))
        if is_text(kind):
            return self._read_text(column)
        if not _is_number(kind):
            raise ValueError("no time")
        return self._read_exact(cast(column, pa.float64(), safe=False))

    def may_be(self, column: Any) -> Any:
        """Of a column of text, which values can be times at all; finds most bad ones at once."""
        return pc.match_substring_regex(column, _DATE if self._unit == _DATES else NUMBER)

    def saw(self, times: npt.NDArray[np.int64]) -> None:
        """Remember the range of times that were kept."""
        if len(times):
            first, last = int(times.min()), int(times.max())
            self._first = first if self._first is None else min(first, self._first)
            self._last = last if self._last is None else max(last, self._last)

    def describe(self) -> str:
        """What the times were taken for, and their range, in which a wrong unit shows."""
        if self._first is None or self._last is None:
            return "none"
        unit = self._unit or _DATES
        if self._digits is not None:
            said = f"dates of {self._digits} digits, in UTC"
        elif unit == _DATES:
            said = "dates, those without a time zone in UTC" if self._dates_without_zone else "dates"
        else:
            said = f"{UNITS[unit]} since 1970, " + (
                "by their size" if self._asked == AUTO else "as asked for"
            )
        wide = self._last - self._first > 2 * 86400
        said += f"; from {_date(self._first, wide)} to {_date(self._last, wide)}"
        if unit in UNITS and abs(self._last) < 366 * 86400 and not self._digits:
            said += " (no dates? Their order is kept; `--time-unit` sets another unit)"
        return said

    def _read_whole(self, values: npt.NDArray[np.int64]) -> Events:
        if self._digits is not None:
            return {"time": seconds_of_digits(values, self._digits)}
        self._check_sizes(values)
        return _whole_and_fraction(values, _PER_SECOND[self._unit or "s"])

    def _read_text(self, column: Any) -> Events:
        """Whole numbers never go through a float, which would merge times in nanoseconds."""
        is_whole = pc.match_substring_regex(column, _WHOLE)
        if not is_whole.false_count:
            return self._read_whole(cast(column, pa.int64()))
        if self._digits is not None:
            raise ValueError("not a date")
        filled = str(_BANDS[self._unit or "s"][0])
        whole = self._read_whole(cast(pc.if_else(is_whole, column, filled), pa.int64()))
        exact = self._read_exact(cast(pc.if_else(is_whole, filled, column), pa.float64()))
        chosen = is_whole.to_numpy(zero_copy_only=False)
        none = np.zeros(len(chosen))
        fraction = np.where(chosen, whole.get("fraction", none), exact.get("fraction", none))
        return {"time": np.where(chosen, whole["time"], exact["time"]), "fraction": fraction}

    def _read_exact(self, values: npt.NDArray[np.float64]) -> Events:
        if not (np.abs(values) < 2.0**63).all():
            raise ValueError("not finite or too large")
        if self._digits is not None:
            if (values != np.floor(values)).any():
                raise ValueError("not a date")
            return self._read_whole(values.astype(np.int64))
        self._check_sizes(values)
        scale = _PER_SECOND[self._unit or "s"]
        seconds = np.floor(values / scale)
        times: Events = {"time": seconds.astype(np.int64)}
        fraction = (values - seconds * scale) / scale
        if fraction.any():
            times["fraction"] = fraction
        return times

    def _check_sizes(self, values: npt.NDArray[Any]) -> None:
        """Numbers whose unit was told from their size must all be of that size."""
        if self._asked != AUTO or not len(values):
            return
        low, high = _BANDS[self._unit or "s"]
        smallest, largest = values.min(), values.max()
        if smallest >= low and largest < high:
            return
        sizes = np.abs(values.astype(np.float64))
        if sizes.min() < low or sizes.max() >= high:
            raise ValueError("another unit")


def _whole_and_fraction(values: npt.NDArray[np.int64], per_second: int) -> Events:
    if per_second == 1:
        return {"time": values}
    seconds, rest = np.divmod(values, per_second)
    return {"time": seconds, "fraction": rest / per_second} if rest.any() else {"time": seconds}


def _is_number(kind: Any) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _date(seconds: int, wide: bool) -> str:
    try:
        when = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s"
    return f"{when:%Y-%m-%d}" if wide else f"{when:%Y-%m-%d %H:%M:%S}"
