"""Users and items: ids as whole numbers."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from freescale.data.columns.arrow import cast
from freescale.data.source import IntArray


def read_ids(column: Any) -> IntArray:
    """The ids of a column, or a ValueError."""
    ids = cast(column, pa.int64())
    if len(ids) and ids.min() < 0:
        raise ValueError("negative")
    return ids
