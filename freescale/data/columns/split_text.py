"""Several values in one cell: lists of JSON and Parquet, or text with a mark between the values."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.arrow import NOTHING, is_text
from freescale.data.source import IntArray

# Python and JSON write lists so: ['a', 'b'].
_BRACKETS = r"^[\[\(\{]\s*|\s*[\]\)\}]$"
_QUOTES = r"^['\"]|['\"]$"


def is_listed(kind: Any) -> bool:
    """Whether a type holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def rows_and_values(column: Any, marks: str) -> tuple[IntArray, Any]:
    """Of every value the row it stands in, and all values of all rows, one behind the other.

    Args:
        column: lists, text, or single values, which are lists of one.
        marks: characters that stand between values of text; blanks around values do not count.
    """
    if is_text(column.type):
        nothing = pc.is_in(column, pa.array(NOTHING, type=column.type))
        column = pc.if_else(nothing, None, column)
        bare = pc.replace_substring_regex(column, _BRACKETS, "")
        bracketed = pc.not_equal(bare, column)
        column = pc.split_pattern_regex(bare, f"[{re.escape(marks)}]")
        rows, values = _flat(column)
        values = pc.utf8_trim_whitespace(values)
        if pc.any(bracketed).as_py():
            values = pc.replace_substring_regex(values, _QUOTES, "")
        there = np.flatnonzero(pc.not_equal(values, "").to_numpy(zero_copy_only=False))
        return rows[there], values.take(pa.array(there))
    if is_listed(column.type):
        rows, values = _flat(column)
        return rows, pc.utf8_trim_whitespace(values) if is_text(values.type) else values
    valid = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    return valid, column.take(pa.array(valid))


def _flat(lists: Any) -> tuple[IntArray, Any]:
    """Lists laid end to end; those that are missing are empty."""
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.repeat(np.arange(len(lists)), lengths), lists.flatten()
