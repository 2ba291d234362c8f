"""How many rows a zero-collision table needs: read off a measured table, not a formula."""

from __future__ import annotations

from dataclasses import dataclass

from freescale.errors import ConfigError

PROBES = (8, 16, 32, 64, 128, 256, 512)
MEASURED: dict[float, tuple[float, ...]] = {
    1.0: (0.12, 0.085, 0.059, 0.042, 0.029, 0.021, 0.015),
    1.05: (0.1, 0.066, 0.04, 0.024, 0.012, 0.0058, 0.002),
    1.1: (0.086, 0.05, 0.026, 0.012, 0.0043, 0.001, 0.00012),
    1.15: (0.073, 0.038, 0.017, 0.0059, 0.0014, 0.00015, 7e-06),
    1.2: (0.061, 0.029, 0.01, 0.0028, 0.00035, 1.2e-05, 0.0),
    1.25: (0.052, 0.021, 0.0067, 0.0012, 0.00011, 0.0, 0.0),
    1.33: (0.039, 0.013, 0.0031, 0.00032, 6e-06, 0.0, 0.0),
    1.5: (0.022, 0.005, 0.00055, 1.3e-05, 0.0, 0.0, 0.0),
    1.75: (0.01, 0.0012, 4.8e-05, 0.0, 0.0, 0.0, 0.0),
    2.0: (0.0048, 0.00031, 4.5e-06, 0.0, 0.0, 0.0, 0.0),
    2.5: (0.0013, 2.7e-05, 0.0, 0.0, 0.0, 0.0, 0.0),
    3.0: (0.00041, 5e-06, 0.0, 0.0, 0.0, 0.0, 0.0),
    4.0: (5.5e-05, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
}
"""Rows for each id -> share of the ids that find no slot, for each of PROBES.

A million random ids, default buckets, mean of two seeds: 0 means fewer than one in two million. Measured by
`python benchmarks/zero_collision.py --table`.
"""


@dataclass(frozen=True)
class Size:
    """One way to size a table.

    Args:
        max_probe: slots an id may live in.
        num_rows: rows of the table.
        rows_per_id: their ratio to the ids.
        collisions: share of the ids that will share a row, as measured.
        plain_hash: the same for a plain hash table of this size.
    """

    max_probe: int
    num_rows: int
    rows_per_id: float
    collisions: float
    plain_hash: float


def size_table(num_ids: int, *, target: float) -> list[Size]:
    """For each probe length, the smallest measured table that keeps the share of ids without a row under the target."""
    if num_ids < 1:
        raise ConfigError("a table is sized for a number of ids", got=num_ids, allowed="1 or more")
    if not 0 <= target < 1:
        raise ConfigError("the target is a share of the ids", got=target, allowed="0 to 1, such as 0.0001")
    sizes = []
    for column, max_probe in enumerate(PROBES):
        for ratio, shares in MEASURED.items():
            if shares[column] <= target:
                rows = max(16, round(num_ids * ratio))
                sizes.append(
                    Size(max_probe, rows, ratio, shares[column], plain_hash_collisions(rows, num_ids))
                )
                break
    return sizes


def plain_hash_collisions(num_rows: int, num_ids: int) -> float:
    """Share of the ids that come second or later to a row of a plain hash table: 1 - taken rows / ids."""
    taken = num_rows * (1 - (1 - 1 / num_rows) ** num_ids)
    return 1 - taken / num_ids
