"""The temporal split against plain lists: nothing from after the moment is learnt from, every target is the first."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import SyntheticSource, digest_data
from freescale.data.batches.examples import Examples
from freescale.data.source import Histories, SplitSource, check_source
from freescale.data.temporal import TemporalSource, read_moment, written
from freescale.data.words.item_names import ItemNames, names_of_items
from freescale.errors import DataError
from tests.effort import examples
from tests.list_source import ListSource

VALID, TEST = 40, 70
EVENT = st.tuples(st.integers(0, 99), st.integers(1, 12))
ANCHOR = [(1, 1), (2, 2), (45, 1), (75, 2)]
"""A history with something for every split."""

HISTORIES = st.lists(st.lists(EVENT, min_size=1, max_size=9).map(sorted), max_size=8).map(
    lambda histories: [*histories, ANCHOR]
)


class TimedSource(ListSource):
    """Histories given as lists of (time, item)."""

    def __init__(self, events, features=("item", "time")):
        super().__init__([[item for _, item in history] for history in events], features)
        self.events = events

    def read(self, rows):
        read = super().read(rows)
        times = np.array([time for row in rows for time, _ in self.events[row]], dtype=np.int64)
        return Histories(read.users, read.offsets, {**read.columns, "time": times})


def split(source):
    return TemporalSource(source, valid_from=str(VALID), test_from=str(TEST))


def expected(events, catalog, name):
    """(inputs, target) of one history, (inputs, None) where its target is new, None where it has none."""
    first, last = {"valid": (VALID, TEST), "test": (TEST, 100)}[name]
    at = next((n for n, (time, _) in enumerate(events) if first <= time < last), None)
    if at is None:
        return None
    known = [item for _, item in events[:at] if item in catalog]
    target = events[at][1]
    return (known, target if target in catalog else None) if known else None


@examples(50, thorough=200)
@given(HISTORIES, st.integers(1, 4))
def test_batches_are_those_of_the_definition(events, max_length):
    source = split(TimedSource(events))
    catalog = Counter(item for history in events for time, item in history if time < VALID)
    assert source.items.ids.tolist() == sorted(catalog)
    assert source.items.train_counts.tolist() == [catalog[item] for item in sorted(catalog)]
    assert source.items.counts.tolist() == source.items.train_counts.tolist()
    for row, history in enumerate(events):
        train = [item for time, item in history if time < VALID]
        batch = Examples(source=source, max_length=max_length).batch([row])
        assert batch.tokens["item"].tolist() == train[:-1][-max_length:]
        assert batch.tokens["target"].tolist() == train[1:][-max_length:]
        for name in ("valid", "test"):
            examples = Examples(source=source, split=name, max_length=max_length)
            wanted = expected(history, catalog, name)
            new = wanted is not None and wanted[1] is None
            assert bool(examples.missed()[row]) == new
            batch = examples.batch([row])
            inputs = [] if wanted is None or new else wanted[0]
            assert batch.tokens["item"].tolist() == inputs[-max_length:]
            assert examples.lengths()[row] == len(inputs[-max_length:])
            if inputs:
                assert int(batch.tokens["target"][-1]) == wanted[1]
            assert examples.seen([row])[1].tolist() == inputs


@examples(13, thorough=200)
@given(HISTORIES, st.data())
def test_what_comes_later_changes_nothing_of_what_is_learnt(events, data):
    """Other events from the moment on: the same batches, catalogue, counts and negatives."""
    later = data.draw(st.lists(st.tuples(st.integers(VALID, 99), st.integers(1, 30)), max_size=4).map(sorted))
    changed = [[e for e in history if e[0] < VALID] + later for history in events[:-1]] + [ANCHOR]
    one, two = split(TimedSource(events)), split(TimedSource(changed))
    assert one.items.ids.tolist() == two.items.ids.tolist()
    assert one.items.counts.tolist() == two.items.counts.tolist()
    for row in range(len(events)):
        a, b = (Examples(source=s, num_negatives=5, seed=1).batch([row], step=3) for s in (one, two))
        assert {n: v.tolist() for n, v in a.tokens.items()} == {n: v.tolist() for n, v in b.tokens.items()}
        assert a.samples["negatives"].tolist() == b.samples["negatives"].tolist()
        assert set(a.samples["negatives"].flatten().tolist()) <= set(one.items.ids.tolist())


def test_a_share_of_the_events_becomes_a_moment():
    source = TimedSource([[(time, 1 + time % 3) for time in range(start, 100, 4)] for start in range(4)])
    view = TemporalSource(source, valid_from="0.8", test_from="0.9")
    assert (view.valid_from, view.test_from) == (80, 90)
    assert view.split_facts() == {"split": "temporal", "valid_from": 80, "test_from": 90}
    assert (np.diff(view.read([0]).columns["time"]) > 0).all()
    assert view.read([0]).columns["time"].max() == 92


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("0.85", 0.85),
        ("978300760", 978300760),
        ("2001-01-01", 978307200),
        ("2001-01-01T01:00:00+01:00", 978307200),
        ("-5", -5),
    ],
)
def test_moments_are_shares_seconds_or_dates(text, moment):
    assert read_moment(text) == moment


@pytest.mark.parametrize("text", ["1.5", "0.0", "yesterday", "", "nan", "2001-13-01"])
def test_what_is_no_moment_is_refused(text):
    with pytest.raises(ValueError, match=r"between 0 and 1|isoformat|month"):
        read_moment(text)


def test_moments_are_written_for_people():
    assert written(978307200) == "2001-01-01 00:00:00 UTC"
    assert written(10**18) == str(10**18)


def test_what_cannot_be_split_is_said():
    with pytest.raises(DataError, match="needs the time of every event"):
        TemporalSource(ListSource([[1, 2, 3, 4]], features=("item",)), valid_from="0.8", test_from="0.9")
    events = [[(10, 1), (20, 2), (50, 1), (80, 2)]]
    with pytest.raises(DataError, match=r"data\.valid_from must be before data\.test_from"):
        TemporalSource(TimedSource(events), valid_from="70", test_from="40")
    with pytest.raises(DataError, match=r"no history to test on(.|\n)*data\.test_from is 1970"):
        TemporalSource(TimedSource(events), valid_from="40", test_from="90")
    with pytest.raises(DataError, match="no history to train on"):
        TemporalSource(TimedSource(events), valid_from="5", test_from="60")
    with pytest.raises(DataError, match="row 1 fall"):
        TemporalSource(TimedSource([events[0], [(20, 1), (10, 2)]]), valid_from="40", test_from="70")


def test_it_is_a_source_that_loader_processes_can_hold_and_ranks_can_compare():
    whole = SyntheticSource(num_users=60, num_items=80, mean_length=10)
    view = TemporalSource(whole, valid_from="0.7", test_from="0.85")
    check_source(view)
    assert isinstance(view, SplitSource)
    again = pickle.loads(pickle.dumps(view))
    rows = [5, 3, 5]
    assert again.read(rows).columns["item"].tolist() == view.read(rows).columns["item"].tolist()
    assert view.read(rows).lengths.tolist() == view.lengths[rows].tolist()
    assert digest_data(view) == digest_data(again)
    assert digest_data(view).parts == digest_data(whole).parts
    assert digest_data(view).catalogue != digest_data(whole).catalogue


class NamedSource(TimedSource):
    def item_names(self, ids):
        return ItemNames(ids, "text", pa.array([f"item {n}" for n in ids], type=pa.large_string()))


def test_items_keep_the_names_the_user_gave_them():
    view = split(NamedSource([*[[(1, 5), (2, 9), (50, 5)]] * 2, ANCHOR]))
    assert names_of_items(view, view.items.ids)[0] == "item 1"
    assert names_of_items(view, view.items.ids).find(["item 9"])[1].tolist() == [3]
