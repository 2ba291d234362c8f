"""Every new event is a target once, behind the events that came before it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.log.window_rows import cut_rows, join, latest
from freescale.data.source import Histories


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=6),
    st.integers(1, 5),
)
def test_every_new_event_but_a_users_first_is_a_target_once(
    sequences: list[tuple[int, int]], max_length: int
) -> None:
    lengths = np.array([old + new for old, new in sequences], np.int64)
    fresh = np.array([new for _, new in sequences], np.int64)
    rows = cut_rows(lengths, fresh, max_length=max_length)
    bases = np.cumsum(lengths) - lengths
    wanted = [
        int(base) + place
        for base, (old, new) in zip(bases, sequences)
        for place in range(max(old, 1), old + new)
    ]
    ends = np.cumsum(rows.lengths)
    found: list[int] = []
    for stop, size, targets in zip(ends, rows.lengths, rows.targets):
        row = rows.events[stop - size : stop]
        assert np.array_equal(
            row, np.arange(row[0], row[0] + size)
        )  # a run of one sequence, nothing left out
        owner = int(np.searchsorted(bases, row[0], side="right")) - 1
        while lengths[owner] == 0:
            owner -= 1
        assert row[-1] < bases[owner] + lengths[owner]
        assert 1 <= targets < size <= max_length + 1
        # Whatever came before and fits is there.
        assert size == max_length + 1 or row[0] == bases[owner]
        found += row[-targets:].tolist()
    assert found == wanted


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 5))
def test_the_latest_events_are_kept(lengths: list[int], max_length: int) -> None:
    index, kept = latest(np.array(lengths, np.int64), max_length=max_length)
    wanted, base = [], 0
    for length in lengths:
        wanted += list(range(base + max(0, length - max_length), base + length))
        base += length
    assert index.tolist() == wanted
    assert kept.tolist() == [min(length, max_length) for length in lengths]


def test_older_events_stand_before_new_ones_even_where_these_are_late() -> None:
    older = _histories({1: [(10, 100)], 3: [(30, 50), (31, 90)]})
    newer = _histories({0: [(1, 5)], 3: [(32, 60), (33, 95)]})
    found = join(older, newer, np.arange(3))
    assert found.users.tolist() == [0, 1, 3]
    assert found.fresh.tolist() == [1, 0, 2]
    assert found.columns["item"].tolist() == [1, 10, 30, 31, 32, 33]
    assert found.columns["time"].tolist() == [5, 100, 50, 90, 60, 95]


def _histories(events: dict[int, list[tuple[int, int]]]) -> Histories:
    flat = [event for each in events.values() for event in each]
    return Histories(
        users=np.array(list(events)),
        offsets=np.cumsum([0, *(len(each) for each in events.values())]),
        columns={
            "item": np.array([item for item, _ in flat], np.int64),
            "time": np.array([time for _, time in flat], np.int64),
        },
    )
