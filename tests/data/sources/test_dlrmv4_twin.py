"""The twin of DLRMv4 has the statistics that are known of the real log, and any user can be made alone."""

import hashlib

import numpy as np
import pytest

from freescale.data import check_source
from freescale.data.features.feature_source import FeatureSource
from freescale.data.pools import IndexedSource, PoolIndex, PoolRule
from freescale.data.sources._twin_listener import DAY_S, FIRST_DAY, LIKED, LISTENED, SKIPPED, num_events
from freescale.data.sources.dlrmv4_twin import CROSS_ROWS, TwinSource
from freescale.errors import DataError

POOL, WINDOW, LEAST_BEFORE = 1362, 20_000, 4086
"""Of the benchmark: events of each kind in a history, how far it looks back, events before a sample."""


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    rank = np.empty(len(scores))
    rank[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    ones = labels.sum()
    return float((rank[labels].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones)))


def test_any_user_alone_and_in_any_order():
    source = TwinSource(num_users=30, length_scale=0.05, seed=3)
    together = source.read([29, 4, 11])
    for place, row in enumerate([29, 4, 11]):
        alone = TwinSource(num_users=30, length_scale=0.05, seed=3).read([row])
        part = slice(together.offsets[place], together.offsets[place + 1])
        for name, column in alone.columns.items():
            np.testing.assert_array_equal(column, together.columns[name][part], err_msg=name)
    other = TwinSource(num_users=30, length_scale=0.05, seed=4).read([29])
    assert not np.array_equal(other.columns["item"], together.columns["item"][: together.offsets[1]])


def test_known_values():
    """The same log on every machine: items, ways there and lengths have no rounding in them."""
    source = TwinSource(num_users=20, length_scale=0.02, seed=1)
    read = source.read(np.arange(20))
    digest = hashlib.blake2b(digest_size=8)
    for column in (read.columns["item"], read.columns["organic"], source.lengths):
        digest.update(np.ascontiguousarray(column, "<i8").tobytes())
    assert digest.hexdigest() == "6b53df9402e90c4a"


def test_it_is_a_source_with_features():
    source = TwinSource(num_users=20, length_scale=0.02)
    check_source(source)
    assert isinstance(source, FeatureSource)
    read = source.read([3, 19])
    played = read.columns["action"] & (LISTENED | SKIPPED) != 0
    assert np.array_equal(np.isnan(read.columns["listened"]), ~played)
    assert np.array_equal(read.columns["listened"][played], read.columns["action"][played] == LISTENED)
    found = source.item_features().take(np.arange(len(source.items.ids)), ["artist", "album"])
    pairs = np.unique(np.stack([found["album"], found["artist"]]), axis=1)
    assert len(pairs[0]) == len(np.unique(pairs[0])), "an album is of one artist"
    counts = source.items.counts
    assert counts.sum() == source.lengths.sum()
    assert source.items.train_counts.sum() == source.lengths.sum() - 2 * 20
    assert source.schema["user_x_artist"].rows == 2000
    assert all(name in source.schema for name in CROSS_ROWS)


def test_time_rises_in_ticks_and_sessions():
    time = TwinSource(num_users=50, length_scale=0.2).read([40]).columns["time"].astype(np.int64)
    gaps = np.diff(time)
    assert (gaps > 0).all()
    assert not (time % 5).any()
    inside = gaps[gaps <= 1800]
    assert inside.max() <= 240, "between a session and the next there is at least half an hour"
    assert 10 <= len(time) / ((gaps > 1800).sum() + 1) <= 40


def test_lengths_are_those_published():
    lengths = num_events(1000)
    assert lengths.mean() == pytest.approx(4763, rel=0.003)
    assert np.median(lengths) == pytest.approx(2695, rel=0.003)
    assert lengths.max() == 27_738
    assert (lengths > LEAST_BEFORE).sum() == 386


@pytest.mark.parametrize(
    "wrong", [{"num_users": 1}, {"length_scale": 0.0}, {"length_scale": 2.0}, {"days": 1}]
)
def test_impossible_sizes(wrong):
    with pytest.raises(DataError, match="cannot be made"):
        TwinSource(**wrong)


@pytest.mark.slow
def test_a_thousandth_has_the_statistics_of_the_whole():
    source = TwinSource()
    read = source.read(np.arange(1000))
    action, odds = read.columns["action"], source.true_odds(np.arange(1000))
    for bits, share in ((LISTENED, 0.613), (SKIPPED, 0.359), (LIKED, 0.019), (0, 0.01)):
        assert (action == bits).mean() == pytest.approx(share, abs=0.01)
    played = (action == LISTENED) | (action == SKIPPED)
    assert auc(odds[played], action[played] == LISTENED) == pytest.approx(0.80, abs=0.005)
    sizes, likes, anchors, on_last_day = [], [], 0, 0
    for user in range(1000):
        part = slice(read.offsets[user], read.offsets[user + 1])
        mine, time = action[part], read.columns["time"][part].astype(np.int64)
        before = np.stack([np.append(0, np.cumsum(mine == bits)) for bits in (LISTENED, LIKED, SKIPPED)])
        at = np.flatnonzero(played[part])
        at = at[at >= LEAST_BEFORE]
        pools = np.minimum(before[:, at] - before[:, np.maximum(at - WINDOW, 0)], POOL)
        sizes.append(pools.sum(axis=0))
        likes.append(pools[1])
        anchors += len(at)
        on_last_day += int((time[at] >= FIRST_DAY + 299 * DAY_S).sum())
    assert anchors / played.sum() == pytest.approx(0.495, abs=0.01)
    assert np.concatenate(sizes).mean() == pytest.approx(2663, rel=0.02)
    assert np.concatenate(likes).mean() == pytest.approx(105, rel=0.15)
    assert 9_000 < on_last_day < 15_000


def test_single_events_are_those_of_whole_histories():
    twin = TwinSource(num_users=6, length_scale=0.02, seed=4)
    rows = np.array([3, 0, 3])
    whole = twin.read(rows)
    first = twin.offsets[rows]
    picks = [np.array([0, 2, 5]), np.array([1]), np.arange(4)]
    places = np.concatenate([start + own for start, own in zip(first, picks)])
    offsets = np.cumsum([0, *map(len, picks)])
    found = twin.events(rows, places, offsets)
    assert isinstance(twin, IndexedSource)
    np.testing.assert_array_equal(found.users, whole.users)
    for name, column in whole.columns.items():
        expected = [column[start + own] for start, own in zip(whole.offsets, picks)]
        np.testing.assert_array_equal(found.columns[name], np.concatenate(expected))
        assert found.columns[name].dtype == column.dtype
    rule = PoolRule("action", (1, 2, 4), 5, 40)
    ends = np.minimum([30, 20, 9], twin.lengths[rows])
    ours, _ = twin.pools(rule).spans(rows, ends)
    theirs, cuts = PoolIndex(whole.columns["action"], whole.offsets, rule).spans(np.arange(3), ends)
    shift = np.repeat(first - whole.offsets[:-1], np.diff(cuts))
    np.testing.assert_array_equal(ours, theirs + shift)
