"""Actions: a number an event, such as a rating."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from freescale.data.columns.arrow import cast


def read_actions(column: Any) -> npt.NDArray[np.float32]:
    """The actions of a column, or a ValueError."""
    with np.errstate(over="ignore"):
        actions = cast(column, pa.float64(), safe=False).astype(np.float32)
    if not np.isfinite(actions).all():
        raise ValueError("not finite")
    return actions
