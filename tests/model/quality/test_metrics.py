"""Metrics against their definitions: sorting, and counting pairs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.model.quality.metrics import BinaryQuality, RankingQuality
from tests.effort import examples

# Steps of 1/2 in the logit lie many bins apart, so that the histogram counts pairs exactly.
PREDICTIONS = st.lists(st.tuples(st.integers(-10, 10).map(lambda x: x / 2), st.booleans()), max_size=40)


def ranking(*batches):
    quality = RankingQuality()
    for ranks in batches:
        quality.update(torch.tensor(ranks, dtype=torch.int64))
    return quality


def binary(*batches):
    quality = BinaryQuality()
    for pairs in batches:
        logits = torch.tensor([x for x, _ in pairs], dtype=torch.float64)
        quality.update(logits, torch.tensor([float(y) for _, y in pairs]))
    return quality


@settings(deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1))
def test_ranking_metrics_by_their_definitions(ranks):
    got = ranking(ranks).values()
    for k in (10, 50, 200):
        hits = [r for r in ranks if r < k]
        assert got[f"hr@{k}"] == pytest.approx(len(hits) / len(ranks))
        assert got[f"ndcg@{k}"] == pytest.approx(sum(1 / math.log2(r + 2) for r in hits) / len(ranks))
    assert got["mrr"] == pytest.approx(sum(1 / (r + 1) for r in ranks) / len(ranks))


def test_ranking_metrics_of_known_places():
    got = ranking([0, 9, 10, 49, 50, 199, 200]).values()
    assert got["hr@10"] == pytest.approx(2 / 7)
    assert got["hr@50"] == pytest.approx(4 / 7)
    assert got["hr@200"] == pytest.approx(6 / 7)
    assert got["ndcg@10"] == pytest.approx((1 + 1 / math.log2(11)) / 7)
    assert ranking([0]).values() == dict.fromkeys(got, 1.0)


def auc_by_pairs(pairs):
    positive, negative = [x for x, y in pairs if y], [x for x, y in pairs if not y]
    if not positive or not negative:
        return None
    wins = sum((p > n) + (p == n) / 2 for p in positive for n in negative)
    return wins / (len(positive) * len(negative))


@examples(20, thorough=200)
@given(PREDICTIONS.filter(len))
def test_binary_metrics_by_their_definitions(pairs):
    got = binary(pairs).values()
    auc = auc_by_pairs(pairs)
    assert got["auc"] == (None if auc is None else pytest.approx(auc, abs=1e-12))
    probabilities = [1 / (1 + math.exp(-x)) for x, _ in pairs]
    losses = [-math.log(p if y else 1 - p) for p, (_, y) in zip(probabilities, pairs)]
    assert got["logloss"] == pytest.approx(sum(losses) / len(pairs))
    rate = sum(y for _, y in pairs) / len(pairs)
    if 0 < rate < 1:
        entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
        assert got["ne"] == pytest.approx(sum(losses) / len(pairs) / entropy)
    else:
        assert got["ne"] is None
    positives = sum(y for _, y in pairs)
    assert got["calibration"] == (pytest.approx(sum(probabilities) / positives) if positives else None)


@examples(10, thorough=200)
@given(PREDICTIONS, PREDICTIONS, st.lists(st.integers(0, 400)), st.lists(st.integers(0, 400)))
def test_sums_of_ranks_add_up_to_the_metrics_of_all(some, others, ranks, more):
    for one, two, together in (
        (binary(some), binary(others), binary(some, others)),
        (ranking(ranks), ranking(more), ranking(ranks, more)),
    ):
        one.sums += two.sums
        for name, value in together.values().items():
            assert one.values()[name] == (None if value is None else pytest.approx(value))


def test_nothing_to_measure_is_not_an_error():
    assert set(ranking().values().values()) == {0.0}
    assert set(binary().values().values()) == {None}
    assert ranking([]).values() == ranking().values()


def test_a_nan_prediction_counts_against_the_model():
    sure = [(5.0, True), (-5.0, False)]
    assert binary(sure).values()["auc"] == 1.0
    for label in (True, False):
        got = binary(sure, [(math.nan, label)]).values()
        assert got["auc"] == 0.5
        assert math.isnan(got["logloss"])


def test_confident_predictions_fall_into_the_last_bins():
    got = binary([(50.0, True), (1e4, True), (-50.0, False), (-1e4, False)]).values()
    assert got["auc"] == 1.0
    assert got["logloss"] == pytest.approx(0.0)
