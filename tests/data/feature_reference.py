"""What features must become, said once more with dicts and loops: the reference of test_features.py."""

from __future__ import annotations

import math
import struct
from typing import Any

NONE = -(2**63)
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def word_hash(word: str) -> int:
    data = word.encode()
    blocks = [data[start : start + 8] for start in range(0, max(len(data), 1), 8)]
    numbers = [int.from_bytes(block, "little") for block in blocks]
    h = mix64((numbers[0] + _GOLDEN * len(data)) & _MASK)
    for number in numbers[1:]:
        h = mix64(((h + _GOLDEN) & _MASK) ^ number)
    return h


def id_of(value: Any, *, text: bool) -> int:
    if value is None:
        return NONE
    return signed(word_hash(str(value))) if text else int(value)


def cross_id(name: str, members: list[int]) -> int:
    if NONE in members:
        return NONE
    h = word_hash(name)
    for member in members:
        h = mix64(((h + _GOLDEN) & _MASK) ^ (member & _MASK))
    return signed(h)


def single(value: float) -> float:
    """The nearest number of single precision."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def bucket(value: float | None, edges: list[float]) -> int:
    if value is None:
        return NONE
    return sum(single(edge) <= single(value) for edge in edges)


def scaled(value: float | None, scale: str, known: list[float]) -> tuple[float, bool]:
    """(the number in a batch, whether it is missing); `known` are the values of the training part."""
    if value is None:
        return 0.0, True
    value = single(value)
    if scale == "log":
        return math.copysign(math.log1p(abs(value)), value), False
    if scale == "standard":
        known = [single(each) for each in known]
        mean = sum(known) / len(known) if known else 0.0
        deviation = math.sqrt(sum((each - mean) ** 2 for each in known) / len(known)) if known else 0.0
        return (value - mean) / (deviation or 1.0), False
    return value, False


def sorted_histories(events: list[dict[str, Any]], min_events: int) -> dict[Any, list[dict[str, Any]]]:
    """User -> events in the order of time; equal times in the order of the input."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        found.setdefault(event["user"], []).append(event)
    return {
        user: sorted(theirs, key=lambda event: event["time"])
        for user, theirs in found.items()
        if len(theirs) >= min_events
    }
