"""A log of made-up events, for tests that train on one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from freescale.data import append_log
from tests.data.log.reference import Event, write_csv

DAY = 86_400
MAX_LENGTH = 8
ON_A_LOG = (
    "embedding.id_map=zero_collision",
    "embedding.rows=64",
    "embedding.max_probe=8",
    "embedding.buckets=4",
    "embedding.eviction=lru",
    f"data.max_length={MAX_LENGTH}",
    "data.global_batch=6",
    "head.num_negatives=4",
    "model.dtype=float64",
    "eval.cutoffs=5,10",
    "eval.metric=ndcg@10",
    "run.keep=100",
)
"""Beside `SMALL`: ids come and go all the time."""


def events_of_day(day: int, *, users: int = 20, events: int = 70) -> list[Event]:
    """Users come back; items are new, day by day, and old ones are forgotten."""
    random = np.random.default_rng(day)
    times = np.sort(random.integers(day * DAY, (day + 1) * DAY, events))
    return [
        (int(user), int(10 * day + item), int(time))
        for user, item, time in zip(random.integers(0, users, events), random.integers(0, 40, events), times)
    ]


def grow(folder: Path, first: int, last: int) -> Path:
    """Append days first .. last - 1 to the log in a folder, one window each."""
    log = folder / "log"
    for day in range(first, last):
        append_log(log, write_csv(folder / f"day-{day}.csv", events_of_day(day)), max_length=MAX_LENGTH)
    return log
