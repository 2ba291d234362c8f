"""The embedded data set: shapes, laws, determinism, and a taste that is really there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.sources.synthetic import SyntheticSource
from tests.effort import examples


@pytest.fixture(scope="module")
def source():
    return SyntheticSource(num_users=2000, num_items=500, seed=3)


def whole(source):
    return source.read(np.arange(len(source.lengths)))


def test_the_same_seed_makes_the_same_data_and_another_seed_other_data():
    one, same, other = (SyntheticSource(num_users=50, seed=seed) for seed in (1, 1, 2))
    for name in ("item", "time"):
        assert np.array_equal(whole(one).columns[name], whole(same).columns[name])
    assert not np.array_equal(one.lengths, other.lengths)


@examples(10, thorough=200)
@given(st.lists(st.integers(0, 49), max_size=20))
def test_any_rows_can_be_read_in_any_order(rows):
    source = SyntheticSource(num_users=50, num_items=40)
    everything, some = whole(source), source.read(rows)
    assert some.lengths.tolist() == source.lengths[rows].tolist()
    for name, values in everything.columns.items():
        wanted = [values[everything.offsets[r] : everything.offsets[r + 1]] for r in rows]
        assert some.columns[name].tolist() == [x for part in wanted for x in part.tolist()]


def test_lengths_are_long_tailed_and_inside_their_bounds(source):
    lengths = source.lengths
    assert lengths.min() >= 4
    assert lengths.max() <= 400
    assert lengths.mean() == pytest.approx(30, rel=0.15)
    assert np.percentile(lengths, 99) > 4 * np.median(lengths)
    assert source.groups.sum() == len(lengths)


def test_the_catalogue_counts_all_events_and_training_events(source):
    histories = whole(source)
    item = histories.columns["item"]
    ids, counts = np.unique(item, return_counts=True)
    assert source.items.ids.tolist() == ids.tolist()
    assert source.items.counts.tolist() == counts.tolist()
    spans = zip(histories.offsets[:-1], histories.offsets[1:])
    training = np.concatenate([item[a : b - 2] for a, b in spans])
    in_training = dict(zip(*np.unique(training, return_counts=True)))
    assert source.items.train_counts.tolist() == [in_training.get(i, 0) for i in ids]
    assert ids.min() >= 1
    assert ids.max() <= 500


def test_time_stamps_never_fall_inside_a_history(source):
    histories = whole(source)
    time = histories.columns["time"]
    for a, b in zip(histories.offsets[:-1], histories.offsets[1:]):
        assert (np.diff(time[a:b]) >= 0).all()
        assert time[a] == 1_600_000_000


def test_noise_follows_the_zipf_law():
    source = SyntheticSource(num_users=3000, num_items=100, zipf=1.0, preference=0.0)
    shares = np.sort(source.items.counts)[::-1] / source.items.counts.sum()
    wanted = 1 / np.arange(1, 101) / (1 / np.arange(1, 101)).sum()
    np.testing.assert_allclose(shares[:10], wanted[:10], rtol=0.1)


def test_the_planted_taste_beats_popularity_and_without_it_nothing_does():
    def hit_rates(preference):
        """How often the next item is among 3: those that most often followed the current one, and the most popular."""
        histories = whole(SyntheticSource(num_users=2000, num_items=300, preference=preference))
        item, edges = histories.columns["item"], histories.offsets
        inside = np.ones(len(item), bool)
        inside[edges[1:] - 1] = False
        now, later = item[:-1][inside[:-1]], item[1:][inside[:-1]]
        half = len(now) // 2
        followed = np.zeros((301, 301))
        np.add.at(followed, (now[:half], later[:half]), 1)
        following = np.argsort(-followed, axis=1)[now[half:], :3]
        popular = np.argsort(-followed.sum(0))[:3]
        return [(guess == later[half:, None]).any(1).mean() for guess in (following, popular)]

    following, popular = hit_rates(0.8)
    assert following > 3 * popular
    following, popular = hit_rates(0.0)
    assert following < 1.05 * popular
