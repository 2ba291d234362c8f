"""Times: whole numbers, and what rounding took from fractional ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.arrow import cast, is_text
from freescale.data.event_columns import Events


def read_times(column: Any) -> Events:
    """Whole times (dates in the unit of the column), and what rounding took away if that is not nothing.

    Whole numbers never go through a float, which would merge times in nanoseconds.
    """
    kind = column.type
    if pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        return {"time": cast(column, pa.int64())}
    whole: Any = 0
    if is_text(kind):
        is_whole = pc.match_substring_regex(column, r"^-?\d+$")
        whole = cast(pc.if_else(is_whole, column, "0"), pa.int64())
        column = pc.if_else(is_whole, "0", column)
    exact = cast(column, pa.float64())
    if not (np.abs(exact) < 2.0**63).all():
        raise ValueError("not finite or too large")
    rounded = np.rint(exact)
    times: Events = {"time": whole + rounded.astype(np.int64)}
    if (exact != rounded).any():
        times["fraction"] = exact - rounded
    return times
