"""Whether a column that nobody uses looks like time: without it histories would be in the order of the file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime
from typing import Any

_TIME_WORDS = {
    *("time", "times", "timestamp", "timestamps", "unixtime", "unixtimestamp", "epoch", "ts"),
    *("date", "dates", "datetime", "datetimes", "day", "dt", "when"),
}
# Durations and zones are no points in time.
_OTHER_WORDS = {
    *(
        "watch",
        "watched",
        "dwell",
        "spent",
        "run",
        "total",
        "duration",
        "delta",
        "diff",
        "gap",
        "zone",
        "limit",
    ),
    *("life", "response", "wait", "since", "num", "count"),
}
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}|\d{4}-\d\d-\d\dT")
# Seconds from 2000 to 2040; times in smaller units are a thousand times as many.
_FIRST, _LAST = 946_684_800, 2_208_988_800


def looks_like_time(name: str, values: Sequence[Any]) -> bool:
    """By name (created_at, eventTime, dt), or by values that are dates or numbers of our years."""
    return _named_like_time(name) or _values_like_time(values)


def _named_like_time(name: str) -> bool:
    words = re.findall(r"[a-z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name).lower())
    if len(words) > 1 and words[-1] == "at":
        return True
    joined = any(word.endswith(("timestamp", "datetime")) for word in words)
    return (joined or bool(_TIME_WORDS & set(words))) and not _OTHER_WORDS & set(words)


def _values_like_time(values: Sequence[Any]) -> bool:
    flat = [value for entry in values for value in (entry if isinstance(entry, list) else [entry])]
    there = [value for value in flat if value is not None and value != ""]
    return bool(there) and all(map(_is_time, there))


def _is_time(value: Any) -> bool:
    if isinstance(value, (date, datetime)):
        return True
    if isinstance(value, str):
        text = value.strip()
        if _DATE.match(text):
            return True
        if not re.fullmatch(r"\d{9,19}(\.\d*)?", text):
            return False
        value = float(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return any(_FIRST * scale <= value < _LAST * scale for scale in (1, 10**3, 10**6, 10**9))
