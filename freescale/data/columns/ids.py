"""Users and items: ids of any kind as 64-bit numbers.

    int64     whole numbers, also `12.0` and their text; negative ones, too
    uint64    some are larger than 2^63 - 1: kept as the same 64 bits
    text      anything else: kept as a hash, its word beside it

A column is of one kind from its first event to its last. It is read as int64 until a value says that it is not; then
all of it is read again. So a number is never one id before that value and another one after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.arrow import NOT_UTF8, NOTHING, is_text
from freescale.data.excerpt import excerpt
from freescale.data.preparing.reading.event_columns import WORDS, Events
from freescale.data.source import IntArray
from freescale.data.words.word_hash import hash_words

IdKind = Literal["int64", "uint64", "text"]
IdKinds = Mapping[str, IdKind]
ID_ROLES = ("user", "item")
ID_KINDS: tuple[IdKind, ...] = ("int64", "uint64", "text")

# `007` is no number: written back it would be 7, and `7` may be somebody else.
_WHOLE = r"^-?(0|[1-9][0-9]*)(\.0+)?$"
_MISSING = pa.array(NOTHING)
_EXACT_FLOAT = 2**53
_SCANNED = 1 << 17


class OtherIdsError(Exception):
    """A column of ids is of another kind than it was read as so far: read it again from its beginning.

    Args:
        kind: what it is, as far as is known by now.
        value: the one that said so.
        index: its number in the column that was looked at.
    """

    def __init__(self, kind: IdKind, value: str, index: int) -> None:
        super().__init__(kind, value, index)
        self.kind, self.value, self.index = kind, value, index
        self.role = ""
        self.place = ""
        self.others: list[OtherIdsError] = []
        """Of other columns of the same lines."""

    def at(self, role: str, place: str) -> OtherIdsError:
        """The same, with the role of the column and the place of the value in the input."""
        self.role, self.place = role, place
        return self


def read_ids(name: str, column: Any, kind: IdKind) -> Events:
    """The ids of a column, and their words where it is one of text; a ValueError where some are missing or no ids.

    Raises:
        OtherIdsError: the column is of another kind.
    """
    column = _plain(column) if len(column) else pa.array([], pa.string())
    if kind == "text":
        words = column if is_text(column.type) else column.cast(pa.string())
        return {name: hash_words(words), name + WORDS: words}
    if is_text(column.type):
        column = _digits(column)
    return {name: _signed(column) if kind == "int64" else _unsigned(column)}


def csv_id_types(data: bytes, separator: str, kinds: IdKinds) -> dict[str, Any]:
    """How a parser of text is to read users and items: as text unless that is sure to be the same.

    Parsers read `007` as 7. Where a field could start so, ids are read as text, which `read_ids` looks at.
    """
    as_numbers = [role for role in ID_ROLES if kinds.get(role, "int64") == "int64"]
    sure = as_numbers if as_numbers and not _starts_with_zeros(data, separator) else []
    return {role: pa.int64() if role in sure else pa.string() for role in ID_ROLES}


def _starts_with_zeros(data: bytes, separator: str) -> bool:
    """Whether some field starts with a 0 and another digit, also behind a minus (the one of 2024-01-31 is none).

    In blocks that stay in a CPU's cache: 0.8 GB/s, where a regular expression has 0.02.
    """
    letters = np.frombuffer(b"\n\n" + data, dtype=np.uint8)
    starts = tuple(b'\n"' + separator.encode())
    for start in range(1, len(letters), _SCANNED):
        block = letters[start : start + _SCANNED + 2]
        before, inside, after = block[:-2], block[1:-1], block[2:]
        found = before == ord("-")
        for mark in starts:
            found |= before == mark
        found &= inside == ord("0")
        found &= (after - np.uint8(ord("0"))) < 10
        places = np.flatnonzero(found)
        signed = places[before[places] == ord("-")]
        if len(signed) < len(places) or np.isin(letters[start + signed - 1], starts).any():
            return True
    return False


def _plain(column: Any) -> Any:
    """Text, checked, or whole numbers; a ValueError for what can be no id."""
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_string_view(kind):
        column = pc.utf8_trim_whitespace(column.cast(pa.string()))
        kind = column.type
    if is_text(kind):
        # Bytes that are no UTF-8 must not become one word: some readers have put this mark in their place.
        column.validate(full=True)
        if pc.any(pc.is_in(column, _MISSING)).as_py() or pc.any(pc.match_substring(column, NOT_UTF8)).as_py():
            raise ValueError("missing or no text")
        return column
    if pa.types.is_floating(kind):
        if not pc.all(pc.less(pc.abs(column), _EXACT_FLOAT)).as_py():
            raise ValueError("not finite, or too large to be exact")
        return column.cast(pa.int64())
    if pa.types.is_decimal(kind):
        return column.cast(pa.string()) if kind.scale == 0 else column.cast(pa.int64())
    if not pa.types.is_integer(kind):
        raise ValueError(f"{kind} is no id")
    return column


def _digits(column: Any) -> Any:
    """Text that is nothing but whole numbers, without `.0`."""
    whole = pc.match_substring_regex(column, _WHOLE)
    if not pc.all(whole, min_count=0).as_py():
        raise _other(column, "text", pc.index(whole, False).as_py())
    if pc.any(pc.match_substring(column, ".")).as_py():
        return pc.replace_substring_regex(column, r"\.0+$", "")
    return column


def _signed(column: Any) -> IntArray:
    try:
        return column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        raise _other(column, "uint64", _first_failure(column, pa.int64())) from None


def _unsigned(column: Any) -> IntArray:
    try:
        return column.cast(pa.uint64()).to_numpy(zero_copy_only=False).view("int64")
    except pa.ArrowInvalid:
        raise _other(column, "text", _first_failure(column, pa.uint64())) from None


def _other(column: Any, kind: IdKind, index: int) -> OtherIdsError:
    return OtherIdsError(kind, excerpt(str(column[index])), index)


def _first_failure(column: Any, kind: Any) -> int:
    """The first value that cannot be cast, found by halving."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low).cast(kind)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low
