"""Requests from histories and from columns: what is history, what is a candidate, and what is never shown."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import PoolRule, RequestExamples, RequestRule, parse_tasks, task_facts
from freescale.data.source import Histories
from freescale.errors import ConfigError, DataError
from tests.effort import examples
from tests.list_source import ListSource


class TimedSource(ListSource):
    """Histories of (item, time, request)."""

    name = "timed"

    def __init__(self, histories):
        super().__init__(
            [[item for item, _, _ in h] for h in histories], ("item", "time", "action", "request")
        )
        self.rows = histories

    def read(self, rows):
        chosen = [self.rows[r] for r in rows]
        flat = np.array([event for h in chosen for event in h], dtype=np.int64).reshape(-1, 3)
        columns = {"item": flat[:, 0], "time": flat[:, 1], "request": flat[:, 2], "action": flat[:, 0] / 2}
        offsets = np.cumsum([0, *(len(h) for h in chosen)]).astype(np.int64)
        return Histories(users=np.asarray(rows, dtype=np.int64), offsets=offsets, columns=columns)


def told(examples, row):
    """History and candidates of a request, and its labels."""
    batch = examples.batch([row])
    items, k = batch.tokens["item"].tolist(), int(batch.targets[0])
    labels = batch.tokens["label_action"].tolist()
    assert not any(labels[: len(items) - k])
    return items[: len(items) - k], items[len(items) - k :], labels[len(items) - k :]


def test_training_events_are_cut_from_the_end_and_each_but_the_first_is_a_label_once():
    made = RequestExamples(
        source=ListSource([[10, 11, 12, 13, 14, 15, 16], [1, 2], [3, 4, 5]]),
        outcomes=("action",),
        candidates=2,
    )
    # Two events are held back: 10 to 14, nothing, and nothing to predict from one event.
    assert [told(made, row) for row in range(len(made.index.user))] == [
        ([10], [11, 12], [5.5, 6.0]),
        ([10, 11, 12], [13, 14], [6.5, 7.0]),
    ]
    assert made.lengths().tolist() == [3, 5]
    assert made.groups.tolist() == [2]
    assert made.index.user.tolist() == [0, 0]


def test_validation_and_test_have_one_request_a_user():
    source = ListSource([[10, 11, 12, 13, 14], [1, 2, 3, 4]])
    for split, wanted in (("valid", ([10, 11, 12], [13])), ("test", ([10, 11, 12, 13], [14]))):
        made = RequestExamples(source=source, outcomes=("action",), split=split, candidates=3)
        assert told(made, 0)[:2] == wanted
        assert len(made.index.user) == 2


def test_the_latest_events_are_kept_and_one_position_is_left_for_candidates():
    made = RequestExamples(
        source=ListSource([[*range(10, 22)]]), outcomes=("action",), candidates=3, max_length=4
    )
    history, shown, _ = told(made, 2)
    assert (history, shown) == ([14, 15, 16], [17, 18, 19])
    assert made.lengths().tolist()[-1] == 6


def test_runs_of_a_column_are_requests_and_a_user_without_history_is_asked_too():
    rows = [(1, 5, 0), (2, 5, 0), (3, 9, 1), (4, 12, 2), (5, 12, 2), (6, 20, 3), (7, 21, 4)]
    made = RequestExamples(source=TimedSource([rows]), outcomes=("action",), by="request")
    assert [told(made, n)[:2] for n in range(len(made.index.user))] == [
        ([], [1, 2]),
        ([1, 2], [3]),
        ([1, 2, 3], [4, 5]),
    ]
    batch = made.batch([2, 0])
    assert batch.targets.tolist() == [2, 2]
    assert batch.tokens["time"].tolist() == [5, 5, 9, 12, 12, 5, 5]
    assert batch.tokens["target_time"].tolist() == [5, 9, 12, 12, 12, 5, 5]


def test_requests_of_a_column_are_held_back_whole():
    rows = [(1, 5, 0), (2, 9, 1), (3, 9, 1), (4, 12, 2), (5, 12, 2), (6, 12, 2)]
    short = [(7, 5, 0), (8, 6, 0)]
    source = TimedSource([rows, short, [(9, 1, 0), (10, 2, 1)]])
    found = {}
    for split in ("train", "valid", "test"):
        made = RequestExamples(source=source, outcomes=("action",), by="request", split=split)
        found[split] = [told(made, n)[:2] for n in range(len(made.index.user))]
        assert made.groups.tolist() == [len(found[split])]
    assert found == {
        "train": [([], [1])],
        "valid": [([1], [2, 3])],
        "test": [([1, 2, 3], [4, 5, 6]), ([9], [10])],
    }


def test_events_of_the_same_second_are_no_history():
    rows = [(1, 5, 0), (2, 7, 0), (3, 7, 0), (4, 7, 0), (5, 9, 0), (6, 9, 0)]
    made = RequestExamples(source=TimedSource([rows]), outcomes=("action",), candidates=1)
    # Candidate 4 is asked for at 7, when 2 and 3 happened, too.
    assert told(made, 2)[:2] == ([1], [4])


def test_the_history_may_be_the_last_of_each_kind():
    kinds = [7, 8, 7, 7, 9, 8, 7, 7, 7, 7]
    source = TimedSource(
        [[(n + 1, 10 * n, kind) for n, kind in enumerate(kinds)], [(n + 1, n, 8) for n in range(6)]]
    )
    made = RequestExamples(
        source=source,
        outcomes=("action",),
        candidates=2,
        max_length=4,
        pools=PoolRule("request", (7, 8), each=2, window=6),
    )
    # 9 is of no pool; of 2, 3, 4 and 6 in the end the latest three are kept.
    assert [told(made, row)[:2] for row in range(4)] == [
        ([1], [2]),
        ([1, 2], [3, 4]),
        ([2, 3, 4], [5, 6]),
        ([3, 4, 6], [7, 8]),
    ]
    assert made.lengths()[:4].tolist() == [2, 4, 5, 5]
    assert told(made, 5)[:2] == ([1, 2], [3, 4])
    with pytest.raises(ConfigError, match="kind"):
        replace(made, pools=PoolRule("kind", (1,), 1, 1))


def test_what_happens_at_or_after_the_request_changes_nothing_of_it():
    rows = [(1, 5, 0), (2, 7, 0), (3, 8, 0), (4, 9, 0), (5, 10, 0), (6, 11, 0)]
    later = [*rows[:3], (9, 90, 0), *rows[4:]]
    made, other = (
        RequestExamples(source=TimedSource([x]), outcomes=("action",), candidates=1) for x in (rows, later)
    )
    assert told(made, 1) == told(other, 1)


@examples(40, thorough=400)
@given(
    st.lists(st.lists(st.integers(1, 40), max_size=14), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(2, 9),
)
def test_batches_hold_what_each_request_holds_alone(histories, k, max_length):
    made = RequestExamples(
        source=ListSource(histories), outcomes=("action",), candidates=k, max_length=max_length
    )
    made = pickle.loads(pickle.dumps(made))
    number = len(made.index.user)
    batch = made.batch(np.arange(number)[::-1])
    assert (batch.lengths.numpy() <= made.lengths()[::-1]).all()
    for n in range(number):
        alone = made.batch([number - 1 - n])
        own = batch.select([n])
        assert own.targets.tolist() == alone.targets.tolist()
        assert all((own.tokens[name] == alone.tokens[name]).all() for name in alone.tokens)
    labels = sum(int(made.batch([n]).targets[0]) for n in range(number))
    assert labels == sum(max(0, len(h) - 3) for h in histories if len(h) > 3)


def test_the_work_of_a_request_is_counted():
    rule = RequestRule(3)
    events, k = 5, 3
    seen = sum(i + 1 for i in range(events)) + k * (events + 1)
    assert rule.pairs(np.array([events + k, 2])).tolist() == [seen, 2]
    assert rule.tokens(np.array([8])).tolist() == [8]


def test_data_without_a_column_is_refused():
    with pytest.raises(ConfigError, match="does not have") as told_so:
        RequestExamples(source=ListSource([[1, 2, 3, 4]]), outcomes=("bought",))
    assert "bought" in str(told_so.value)


def test_tasks_are_read_and_written_in_one_line():
    lines = [
        "click = action > 0",
        "share = action & 4 where click weight 0.5",
        "t = number action where click log huber 2",
    ]
    rules = parse_tasks(lines)
    assert [rule.kind for rule in rules] == ["binary", "binary", "number"]
    assert parse_tasks([str(rule) for rule in rules]) == rules


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "at least one task"),
        (["click"], "this is no task"),
        (["click = action"], "this is no task"),
        (["click = number action > 3"], "this is no task"),
        (["click = action > many"], "this is no task"),
        (["click = action & 1.5"], "this is no task"),
        (["click = action > 0 weight -1"], "this is no task"),
        (["click = action > 0 sometimes"], "this is no task"),
        (["click = action > 0 log"], "for numbers"),
        (["a = action > 0", "a = action > 1"], "two tasks"),
        (["a = action > 0 where b"], "no such task"),
        (["a = action > 0 where b", "b = number action"], "no such task"),
    ],
)
def test_lines_that_are_no_tasks_are_refused(lines, said):
    with pytest.raises(ConfigError, match=said):
        parse_tasks(lines)


def test_what_a_user_did_in_a_window_is_a_request():
    """Windows of ten seconds begin at 0, 10, 20, ...; what was before one is its history."""
    rows = [(1, 5, 0), (2, 9, 0), (3, 10, 0), (4, 19, 0), (5, 42, 0), (6, 50, 0), (7, 51, 0), (8, 63, 0)]
    found = {}
    for split in ("train", "valid", "test"):
        made = RequestExamples(source=TimedSource([rows]), outcomes=("action",), window=10, split=split)
        found[split] = [told(made, n)[:2] for n in range(len(made.index.user))]
    assert found == {
        "train": [([], [1, 2]), ([1, 2], [3, 4]), ([1, 2, 3, 4], [5])],
        "valid": [([1, 2, 3, 4, 5], [6, 7])],
        "test": [([1, 2, 3, 4, 5, 6, 7], [8])],
    }
    with pytest.raises(ConfigError, match="both say"):
        RequestExamples(source=TimedSource([rows]), outcomes=("action",), window=10, by="request")


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (math.inf, {}, "head.tasks: action has a value that no label"),
        (-1.0, {"logs": ("action",)}, "whose ln"),
        (-2.0, {"weights": "action"}, "head.weights: action has a value that no weight"),
    ],
)
def test_bad_labels_and_weights_are_refused_by_their_key(value, options, message):
    source = WithActions([[1, 2, 3, 4, 5]], [0.0, value, 1.0, 2.0, 3.0])
    with pytest.raises(DataError, match=message):
        RequestExamples(source=source, outcomes=("action",), candidates=2, **options).batch([0])
    # In a history nobody asks for it.
    good = WithActions([[1, 2, 3, 4, 5]], [value, 0.0, 1.0, math.nan, 3.0])
    made = RequestExamples(source=good, outcomes=("action",), candidates=2, **options)
    assert made.batch([0]).targets.tolist() == [2]


class WithActions(ListSource):
    """One user, whose actions are given."""

    def __init__(self, histories, actions):
        super().__init__(histories)
        self._actions = actions

    def read(self, rows):
        found = super().read(rows)
        return replace(
            found, columns={**found.columns, "action": np.tile(np.float32(self._actions), len(rows))}
        )


def test_a_task_with_one_label_is_found():
    source = WithActions([[1, 2, 3, 4, 5, 6]], [9.0, 0.0, 0.0, 4.0, 5.0, 1.0])
    made = RequestExamples(source=source, outcomes=("action",), candidates=2)  # candidates: 0, 0, 4
    lines = (
        "some = action > 3",
        "all = action >= 0",
        "stars = number action",
        "same = number action where some",
    )
    facts = task_facts(made, parse_tasks(lines))
    assert [(each.counted, each.true, each.learnable) for each in facts] == [
        (3, 1, True), (3, 3, False), (3, 0, True), (1, 0, False),
    ]  # fmt: skip
