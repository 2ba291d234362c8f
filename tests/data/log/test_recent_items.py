"""Items of the last windows as the catalogue: what is gone is neither drawn as a negative nor ranked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from freescale.data import LogExamples, LogSource, NextWindow
from tests.grown_log import MAX_LENGTH, events_of_day, grow

DAYS = 5


def test_the_catalogue_is_what_occurred_in_the_last_windows(tmp_path: Path) -> None:
    grow(tmp_path, 0, DAYS)
    days = [Counter(item for _, item, _ in events_of_day(day)) for day in range(DAYS)]
    for recent in (1, 2, None):
        source = LogSource(tmp_path / "log", recent=recent)
        for window in (4, 0, 3, 1, 2):
            first = 0 if recent is None else max(0, window + 1 - recent)
            wanted = sum(days[first : window + 1], Counter())
            found = source.items_of(window)
            assert dict(zip(found.ids.tolist(), found.counts.tolist())) == wanted
            assert source.all_items_of(window).ids.tolist() == sorted(set().union(*days[: window + 1]))


def test_negatives_and_targets_are_of_that_catalogue(tmp_path: Path) -> None:
    grow(tmp_path, 0, DAYS)
    source = LogSource(tmp_path / "log", recent=1)
    train = LogExamples(source=source, max_length=MAX_LENGTH, num_negatives=50)
    first = sum(source.entry(n).rows for n in range(3))
    drawn = train.batch(np.arange(first, first + 6)).samples["negatives"].numpy()
    assert set(drawn.ravel().tolist()) <= set(source.items_of(3).ids.tolist())
    asked, every = NextWindow(source, 4), NextWindow(LogSource(tmp_path / "log"), 4)
    assert asked.items.ids.tolist() == source.items_of(3).ids.tolist()
    assert int(asked.unknown.sum()) > int(every.unknown.sum())
