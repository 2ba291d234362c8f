"""Requests of a log: every new event is a candidate once, behind what came before it, in its own window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import LogRequests, LogSource, append_log
from tests.effort import examples


def _log(folder: Path, days: list[list[tuple[int, int, int, int]]]) -> LogSource:
    for number, events in enumerate(days):
        lines = "".join(f"{user},{item},{time},{action}\n" for user, item, time, action in events)
        (folder / f"{number}.csv").write_text("user,item,time,action\n" + lines)
        append_log(folder / "log", folder / f"{number}.csv", max_length=6)
    return LogSource(folder / "log")


def _shown(requests: LogRequests, window: int) -> list[tuple[list[int], list[int], list[float]]]:
    """(history, candidates, labels) of every request of a window."""
    first = sum(requests.num_rows(n) for n in range(window))
    found = []
    for row in range(first, first + requests.num_rows(window)):
        batch = requests.batch([row])
        assert batch.targets is not None
        count = int(batch.targets[0])
        items = batch.tokens["item"].tolist()
        labels = batch.tokens["label_action"].tolist()[-count:]
        assert batch.samples["row"].tolist() == [row]
        found.append((items[:-count], items[-count:], labels))
    return found


def _requests(source: LogSource, **options: object) -> LogRequests:
    return LogRequests(source=source, max_length=6, options={"outcomes": ("action",), **options})


def test_new_events_are_candidates_behind_older_ones(tmp_path: Path) -> None:
    first = [(1, 10, 1, 0), (1, 11, 2, 1), (1, 12, 3, 1), (2, 10, 3, 0)]
    second = [(1, 13, 10, 1), (1, 14, 11, 0), (2, 15, 12, 1)]
    source = _log(tmp_path, [first, second])
    two = _requests(source, candidates=2)
    assert _shown(two, 0) == [([10], [11, 12], [1, 1])]
    assert _shown(two, 1) == [([10, 11, 12], [13, 14], [1, 0]), ([10], [15], [1])]
    by_time = _requests(source, by="time")
    assert _shown(by_time, 0) == [([10], [11], [1]), ([10, 11], [12], [1])]
    assert [facts.tolist() for facts in two.facts_of(1)][2] == [2, 1]
    nxt = two.next_window(1, most=1)
    assert (nxt.num_targets, nxt.num_unknown, len(nxt.index.user)) == (3, 3, 1)
    assert nxt.source.items.ids.tolist() == [10, 11, 12]
    with pytest.raises(Exception, match="nowhere"):
        _requests(source, by="nowhere").num_rows(0)


def test_a_late_request_does_not_see_what_happened_after_it(tmp_path: Path) -> None:
    late = [(1, 11, 50, 1), (1, 13, 60, 0), (1, 14, 200, 1)]
    source = _log(tmp_path, [[(1, 10, 100, 0), (1, 12, 110, 1)], late])
    wanted = [([], [11], [1]), ([], [13], [0]), ([10, 12, 11, 13], [14], [1])]
    assert _shown(_requests(source, candidates=1), 1) == wanted


@examples(10, 100)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 50)), min_size=4, max_size=20
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([{"candidates": 1}, {"candidates": 3}, {"by": "time"}, {"window": 20}]),
)
def test_every_target_is_a_candidate_once(
    tmp_path_factory: pytest.TempPathFactory,
    days: list[list[tuple[int, int, int]]],
    options: dict[str, object],
) -> None:
    folder = tmp_path_factory.mktemp("requests")
    moved = [
        [(user, item, 100 * day + time, item % 2) for user, item, time in events]
        + [(9, 1, 100 * day + 60, 0), (9, 2, 100 * day + 61, 1)]
        for day, events in enumerate(days)
    ]
    source = _log(folder, moved)
    requests = _requests(source, **options)
    for window in range(source.num_windows):
        shown = [item for _, items, _ in _shown(requests, window) for item in items]
        stored, targets = source.window(window), source.targets(window)
        read = stored.read(np.arange(len(stored)))
        wanted = [
            int(item)
            for stop, count in zip(read.offsets[1:], targets)
            for item in read.columns["item"][stop - count : stop]
        ]
        assert shown == wanted
        assert requests.facts_of(window).targets.sum() == source.entry(window).targets
