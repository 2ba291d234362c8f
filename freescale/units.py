"""How numbers are written for people, the same in the terminal and in the report."""

from __future__ import annotations

import math
from collections.abc import Mapping


def number(value: object) -> float | None:
    """The value as a float that can be drawn and averaged, or None; 1e100 is as good as infinite here."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, int | float)):
        return None
    return float(value) if -1e100 <= value <= 1e100 else None


def count(value: float) -> str:
    """A quantity with thousands separators: `41,230`, `12.3`, `0.0312`."""
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.4g}"


def whole(value: object) -> str:
    """A whole number of a table's cell: `41,230`; `-` where there is none."""
    found = number(value)
    return "-" if found is None else f"{found:,.0f}"


def compact(value: float) -> str:
    """A tick label of at most five or so characters: `41.2k`, `0.25`, `2.5e-4`."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    if 0 < abs(value) < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def percent(fraction: float) -> str:
    """A fraction as a percentage: `3.1%`; two decimals below one percent, where they matter."""
    return f"{fraction:.2%}" if 0 < abs(fraction) < 0.01 else f"{fraction:.1%}"


def metric(value: float) -> str:
    """A ranking metric, always four decimals so that columns line up."""
    return f"{value:.4f}"


def loss(value: float) -> str:
    """A loss: four decimals, scientific once these would hide it."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 or not math.isfinite(value) else f"{value:.2e}"


def duration(seconds: float) -> str:
    """A time span as clocks show it: `0:41`, `12:05`, `3:20:00`, `2d 03:20:00`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def long_duration(seconds: float) -> str:
    """A time span in its two leading units, for where there is room: `41 s`, `12 min 5 s`, `2 d 3 h`."""
    rest = max(0, round(seconds))
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        amount, rest = divmod(rest, size)
        if amount or parts:
            parts.append(f"{amount} {unit}" if amount else "")
    return " ".join(part for part in parts[:2] if part) or "0 s"


def milliseconds(value: float) -> str:
    """A step time in the unit that keeps it short: `52.1 ms`, `21.4 s`."""
    return f"{value:,.1f} ms" if abs(value) < 10_000 else f"{value / 1000:,.1f} s"


def factor(value: float | None, baseline: float | None) -> str | None:
    """How many times the baseline a value is (`3.9x`), or None where that means nothing."""
    if value is None or not baseline or baseline < 0:
        return None
    ratio = value / baseline
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 1.1 else f"{ratio:.2f}x"


def fact(value: object) -> str:
    """Any value of a facts table: numbers with separators, lists joined, yes and no for flags."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return count(value)
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {fact(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(fact(item) for item in value)
    return str(value)
