"""Anchors: single events as requests, by day and user, with nothing of the event itself in their history."""

from __future__ import annotations

import numpy as np
import pytest

from freescale.data import AnchorRule, PoolRule, RequestExamples
from freescale.data.sources.dlrmv4_twin import TwinSource
from freescale.errors import ConfigError, DataError

DAY_S = 86_400


@pytest.fixture(scope="module")
def source():
    return TwinSource(num_users=12, length_scale=0.02, days=20, seed=5)


def made(source, split="train", **options):
    rule = AnchorRule("listened", history=8, days=3)
    return RequestExamples(
        source=source, outcomes=("listened",), split=split, max_length=20, **{"anchors": rule, **options}
    )


def by_hand(source, split, history=8, days=3):
    """(day, user, event) of every anchor, one event at a time."""
    every = [source.read([user]).columns for user in range(len(source.lengths))]
    last = max(int(columns["time"].max()) for columns in every) // DAY_S
    begin, end = {
        "train": (0, last + 1 - 2 * days),
        "valid": (last + 1 - 2 * days, last + 1 - days),
        "test": (last + 1 - days, last + 1),
    }[split]
    return sorted(
        (int(time) // DAY_S, user, event)
        for user, columns in enumerate(every)
        for event, (time, label) in enumerate(zip(columns["time"], columns["listened"]))
        if event >= history and not np.isnan(label) and begin <= time // DAY_S < end
    )


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_every_event_with_a_label_and_a_history_once_day_by_day(source, split):
    index = made(source, split).index
    assert [(user, event) for _, user, event in by_hand(source, split)] == list(
        zip(index.user.tolist(), index.start.tolist())
    )
    assert (index.stop == index.start + 1).all()
    assert index.groups.sum() == len(index.user)


def test_history_is_what_stands_before_and_the_moment_that_of_its_last_event(source):
    examples = made(source)
    user, start, *_ = examples.index
    rows = [0, len(user) // 2, len(user) - 1, 0]
    batch = examples.batch(rows)
    lengths = examples.lengths()[rows]
    assert batch.lengths.tolist() == lengths.tolist()
    for number, row in enumerate(rows):
        columns = source.read([int(user[row])]).columns
        stop = int(start[row])
        first = max(0, stop - 19)
        own = slice(int(batch.offsets[number]), int(batch.offsets[number + 1]))
        expected = [*columns["item"][first:stop], columns["item"][stop]]
        assert batch.tokens["item"][own].tolist() == expected
        time = batch.tokens["time"][own].tolist()
        assert time == [*columns["time"][first:stop], columns["time"][stop - 1]]
        assert batch.tokens["target_time"][own][-1] == columns["time"][stop - 1]
        assert batch.tokens["label_listened"][own].tolist() == [0.0] * (stop - first) + [
            columns["listened"][stop]
        ]
    assert batch.samples["request_user"].tolist() == user[rows].tolist()


def test_pools_count_what_they_keep(source):
    examples = made(source, pools=PoolRule("action", (1, 2, 4), 4, 50))
    user, start, *_ = examples.index
    rows = [0, 3, len(user) - 1]
    batch = examples.batch(rows)
    assert batch.lengths.tolist() == examples.lengths()[rows].tolist()
    for number, row in enumerate(rows):
        action = source.read([int(user[row])]).columns["action"]
        stop = int(start[row])
        window = np.arange(max(0, stop - 50), stop)
        kept = np.sort(np.concatenate([window[action[window] == kind][-4:] for kind in (1, 2, 4)]))
        item = source.read([int(user[row])]).columns["item"]
        own = slice(int(batch.offsets[number]), int(batch.offsets[number + 1]) - 1)
        assert batch.tokens["item"][own].tolist() == item[kept].tolist()


def test_what_cannot_be_had_is_refused(source):
    with pytest.raises(DataError, match="no event of the train part"):
        made(source, anchors=AnchorRule("listened", history=100_000)).lengths()
    with pytest.raises(ConfigError, match="column that the data does not have"):
        made(source, anchors=AnchorRule("heard"))
