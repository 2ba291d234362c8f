"""Counts of items equal those of a plain loop, however many runs they waited in."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.preparing.writing.item_counts import ItemCounts

ids = st.one_of(st.integers(0, 40), st.integers(-(2**63), 2**63 - 1))
histories = st.lists(st.lists(ids, min_size=1, max_size=12), min_size=1, max_size=5)


@given(blocks=st.lists(histories, min_size=1, max_size=12), run_items=st.sampled_from([1, 2, 7, 20, 1000]))
def test_counts_are_those_of_a_plain_loop(blocks: list[list[list[int]]], run_items: int) -> None:
    every, train = Counter[int](), Counter[int]()
    with TemporaryDirectory() as folder:
        counted = ItemCounts(Path(folder), run_items=run_items)
        for block in blocks:
            for history in block:
                every.update(history)
                train.update(history[:-2])
            items = np.array([item for history in block for item in history], dtype=np.int64)
            counted.add(items, np.array([len(history) for history in block]))
        found, counts, train_counts = counted.merged()
        assert found.tolist() == sorted(every)
        assert counts.tolist() == [every[item] for item in sorted(every)]
        assert train_counts.tolist() == [train[item] for item in sorted(every)]
        assert not list(Path(folder).iterdir()), "files without a name leave nothing behind"


def test_a_range_is_no_larger_than_memory_allows() -> None:
    rng = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        counted = ItemCounts(Path(folder), run_items=1000)
        for _ in range(40):
            counted.add(rng.integers(-(2**62), 2**62, 900), np.full(9, 100))
        counted._add_up(0)
        sizes = [sum(len(part[0]) for part in parts) for parts in counted._ranges()]
    assert sum(sizes) == 36_000
    assert max(sizes) < 3000
