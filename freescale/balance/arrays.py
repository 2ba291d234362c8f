"""Array types of the planner and the one place where lengths are checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from freescale.errors import DataError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def checked_lengths(lengths: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Sample lengths as they are, so that those of a file may stay there.

    Raises:
        DataError: they are empty, negative, fractional or not one number a sample.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or array.size == 0:
        raise DataError(
            "Lengths must be one number for each of at least one sample.",
            got=f"an array of shape {array.shape}",
            next_step="pass the length index of the data set, for example source.lengths",
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError("Lengths must be whole numbers.", got=f"dtype {array.dtype}", allowed="integers >= 0")
    shortest = int(array.min())
    if shortest < 0:
        row = int(array.argmin())
        raise DataError(
            "Lengths must not be negative.", got=f"{shortest} in row {row}", allowed="integers >= 0"
        )
    return array
