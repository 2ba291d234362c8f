"""Events the input has twice are counted and told, and left out where that is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import ParquetSource, prepare
from freescale.data.preparing.reading.event_columns import sort_events
from freescale.data.preparing.sorting.duplicates import find_copies
from freescale.errors import DataError

EVENTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from([0.0, 0.5]),
    ),
    max_size=30,
)


@given(EVENTS, st.booleans(), st.booleans())
def test_copies_are_those_that_equal_one_before(rows: list, with_action: bool, with_fraction: bool) -> None:
    columns = np.array(rows, dtype=float).reshape(-1, 5).T
    events = {name: columns[place].astype(np.int64) for place, name in enumerate(("user", "item", "time"))}
    events |= {"action": columns[3].astype(np.float32)} if with_action else {}
    events |= {"fraction": columns[4]} if with_fraction else {}
    events = sort_events(events) if rows else events
    keys = list(zip(*(column.tolist() for column in events.values())))
    assert find_copies(events).tolist() == [key in keys[:place] for place, key in enumerate(keys)]


def write(path: Path, *, copies: int, header: str = "user,item,time,rating") -> Path:
    lines = [f"u{user},i{event},{100 * event},{event}" for user in range(5) for event in range(6)]
    fields = len(header.split(","))
    path.write_text(
        "\n".join([header, *(",".join(line.split(",")[:fields]) for line in lines * copies)]) + "\n"
    )
    return path


@pytest.mark.parametrize("memory_mb", [1, 512])
def test_they_are_told_and_left_out_if_asked_for(memory_mb: int, tmp_path: Path) -> None:
    once, twice = write(tmp_path / "once.csv", copies=1), write(tmp_path / "twice.csv", copies=2)
    plain = prepare(once, tmp_path / "plain", memory_mb=memory_mb)
    kept = prepare(twice, tmp_path / "kept", memory_mb=memory_mb)
    dropped = prepare(twice, tmp_path / "dropped", duplicates="drop", memory_mb=memory_mb)
    assert not any("duplicates" in line for line in plain.taken)
    assert "duplicates: 30 events have user, item, time and action of one before: kept; " in " ".join(
        kept.taken
    )
    assert any(line.endswith("of one before: dropped") for line in dropped.taken)
    assert (kept.num_events, dropped.num_events) == (60, 30)
    assert ParquetSource(dropped.path).digests() == ParquetSource(plain.path).digests()


def test_without_times_nobody_can_tell_and_unknown_words_are_refused(tmp_path: Path) -> None:
    twice = write(tmp_path / "twice.csv", copies=2, header="user,item")
    assert prepare(twice, tmp_path / "kept", duplicates="drop").num_events == 60
    with pytest.raises(DataError, match="duplicates is neither"):
        prepare(twice, tmp_path / "other", duplicates="merge")
