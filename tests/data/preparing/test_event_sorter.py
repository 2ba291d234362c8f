"""Spilled and merged events come out as a stable sort in memory would give them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.preparing.preparation import ColumnNames, prepare
from freescale.data.preparing.sorting import event_sorter
from tests.data.raw_forms import histories, write
from tests.effort import examples

EVENT = st.tuples(st.integers(0, 6), st.integers(0, 2**63 - 1), st.integers(-3, 3) | st.just(2**62))


@examples(13, thorough=200)
@given(
    events=st.lists(EVENT, min_size=1, max_size=20) | st.lists(EVENT, min_size=30, max_size=120),
    with_time=st.booleans(),
)
def test_order_is_that_of_a_stable_sort_whatever_the_memory(events: list[Any], with_time: bool) -> None:
    expected: dict[int, list[int]] = {}
    for user, item, _ in sorted(events, key=lambda e: (e[0], e[2] if with_time else 0)):
        expected.setdefault(user, []).append(item)
    columns = ColumnNames(time=None if with_time else "")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_sorter, "_RUN_BATCHES", 4)  # so that even a few events are merged in ranges
        root = Path(folder)
        rows = "".join(f"{user},{item},{time}\n" for user, item, time in events)
        source = write(root / "x.csv", "user,item,time\n" + rows)
        for name, memory_mb in (("a", 512), ("b", 0.0001)):
            options = {"columns": columns, "min_events": 1, "time_unit": "s", "name": "x"}
            prepare(source, root / name, memory_mb=memory_mb, **options)
        assert histories(root / "a") == expected
        assert list(histories(root / "b")) == sorted(expected)
        for file in (root / "a").iterdir():
            assert file.read_bytes() == (root / "b" / file.name).read_bytes(), file.name
