"""Negatives as a pure function of (seed, step, sample): whichever rank computes a sample, it meets the same ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from freescale.data.source import IntArray

_UInt = npt.NDArray[np.uint64]


def mix64(x: _UInt) -> _UInt:
    """A 64-bit finaliser: every input bit reaches every output bit (the constants are splitmix64's)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw_negatives(rows: IntArray, *, num_negatives: int, num_items: int, seed: int, step: int) -> IntArray:
    """[len(rows), num_negatives] numbers in [0, num_items), uniform, with replacement.

    Args:
        rows: the samples' row numbers in the data set, the part of the key that no plan can change.
        num_negatives: draws a sample.
        num_items: size of the catalogue.
        seed: the run's seed.
        step: the training step.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        run = mix64(np.asarray([seed], np.uint64) * golden + np.uint64(step))
        sample = mix64(run + (rows.astype(np.uint64) + np.uint64(1)) * golden)
        draw = mix64(sample[:, None] + np.arange(1, num_negatives + 1, dtype=np.uint64) * golden)
        # The high half of (32 random bits) x (num_items): uniform to 1 part in 2^32 / num_items, and no division.
        return (((draw >> np.uint64(32)) * np.uint64(num_items)) >> np.uint64(32)).astype(np.int64)
