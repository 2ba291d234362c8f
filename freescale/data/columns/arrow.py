"""Small helps for Arrow columns."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

# What tools write where there is nothing. Taken for an id, it would be one huge user.
NOTHING = (
    "",
    "NULL",
    "Null",
    "null",
    "\\N",
    "NaN",
    "nan",
    "NA",
    "<NA>",
    "N/A",
    "n/a",
    "#N/A",
    "None",
    "none",
)
NOT_UTF8 = "\ufffd"
"""Stands where bytes were no UTF-8."""

NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
"""Text that is a number."""


def cast(column: Any, kind: Any, *, safe: bool = True) -> npt.NDArray[Any]:
    """The values in another type; an Arrow error where that loses something and `safe` forbids it."""
    return column.cast(kind, safe=safe).to_numpy(zero_copy_only=False)


def is_text(kind: Any) -> bool:
    """Whether a type holds text."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def without_nothing(column: Any) -> Any:
    """The values that are there."""
    column = column.drop_null()
    if not is_text(column.type):
        return column
    return column.filter(pc.invert(pc.is_in(column, pa.array(NOTHING, type=column.type))))
