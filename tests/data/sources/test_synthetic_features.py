"""The embedded data set with features: the planted taste shows in them, and nothing else changes without them."""

from __future__ import annotations

import numpy as np

from freescale.data import NONE, BatchFeatures, Examples, FeatureSource, SyntheticSource, digest_data

SIZES = {"num_users": 400, "num_items": 500}


def test_countries_have_their_genres() -> None:
    source = SyntheticSource(**SIZES, with_features=True)
    assert isinstance(source, FeatureSource)
    histories = source.read(np.arange(400))
    index = np.searchsorted(source.items.ids, histories.columns["item"])
    genre = source.item_features().take(index, ["genre"])["genre"]
    country = np.repeat(histories.user_columns["country"], histories.lengths)
    share = np.zeros((4, int(genre.max()) + 1))
    np.add.at(share, (country, genre), 1)
    assert (share / share.sum(0)).max(0).mean() > 0.6


def test_time_spent_shows_whether_a_taste_was_met() -> None:
    source = SyntheticSource(**SIZES, with_features=True, preference=0.5)
    watched = source.read(np.arange(400)).columns["watched"]
    assert 0.02 < np.isnan(watched).mean() < 0.1
    assert 0.3 < (watched[~np.isnan(watched)] > 20).mean() < 0.7


def test_batches_carry_all_of_it_in_any_order() -> None:
    source = SyntheticSource(**SIZES, with_features=True)
    whole = Examples(source=source, features=BatchFeatures(source, source.schema))
    batch, alone = whole.batch([5, 3]), whole.batch([3])
    start = int(batch.offsets[1])
    for name, values in alone.tokens.items():
        if name.endswith("_index"):  # to the items of either batch
            assert alone.items["item"][values].equal(batch.items["item"][batch.tokens[name][start:]])
        else:
            assert values.equal(batch.tokens[name][start:]), name
    for name, values in alone.samples.items():
        assert values.equal(batch.samples[name][1:]), name
    assert batch.items["genres"].shape[1] == 2
    assert (batch.items["genres"][:, 1] == NONE).any()
    known = batch.tokens["watched"][~batch.tokens["watched.none"]]
    assert abs(float(known.mean())) < 1
    assert not [name for name in batch.tokens if name.startswith(("target_watched", "target_action"))]


def test_without_features_it_is_the_same_data_set_as_ever() -> None:
    plain, rich = SyntheticSource(**SIZES), SyntheticSource(**SIZES, with_features=True)
    assert plain.features == rich.features == ("item", "time")
    assert set(plain.read([0]).columns) == {"item", "time"}
    assert digest_data(plain).schema == ""
    assert digest_data(rich).schema != ""
    assert digest_data(plain).fingerprint != digest_data(rich).fingerprint
