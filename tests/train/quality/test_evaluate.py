"""Evaluation against one user at a time, alone and over ranks."""

from __future__ import annotations

import math
import random
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from freescale.comm.world.ranks import Ranks
from freescale.data.batches.examples import Examples
from freescale.embedding import SGD, DirectMap, HashMap
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.kernels import SequenceLayout
from freescale.model.encoders.hstu import HSTU
from freescale.model.heads import RankingHead, RetrievalHead
from freescale.model.recommender import Recommender
from freescale.train.item_vectors import IdItems
from freescale.train.quality.baselines import popularity_quality, repeat_quality
from freescale.train.quality.evaluate import Evaluator, users_at_once
from freescale.train.quality.full_ranking import FULL, Rule
from tests.list_source import ListSource
from tests.ranks import run_on_ranks

DIM = 4
CPU = torch.device("cpu")


def make_source(num_users=23, num_items=60):
    rng = random.Random(4)
    return ListSource(
        [[rng.randint(1, num_items) for _ in range(rng.randint(1, 14))] for _ in range(num_users)]
    )


def make_evaluator(
    source,
    *,
    head=None,
    ranks=None,
    id_map=None,
    replicate_below_mb=0.0,
    batch=5,
    item_chunk=17,
    rule=FULL,
    cutoffs=(10, 50, 200),
):
    torch.manual_seed(3)
    head = head or RetrievalHead()
    encoder = HSTU(dim=DIM, layers=1, max_length=6, time_bias=True)
    id_map = id_map or DirectMap(int(source.items.ids[-1]) + 1)
    ranks = ranks or Ranks(0, 1, CPU)
    table = TableSpec(
        name="item", num_rows=id_map.num_rows, dim=DIM, optimizer=SGD(), dtype=torch.float64, init_std=1.0
    )
    return Evaluator(
        model=Recommender(encoder=encoder, head=head).double(),
        items=IdItems(
            embedding=ShardedEmbedding([table], group=ranks.group, replicate_below_mb=replicate_below_mb),
            id_map=id_map,
            device=CPU,
        ),
        ranks=ranks,
        batch=batch,
        item_chunk=item_chunk,
        rule=rule,
        cutoffs=cutoffs,
    )


def last_state(evaluator, examples, row):
    """State of the last position of one user, from the table and the model alone."""
    batch = examples.batch([row])
    table = evaluator.items.embedding.tables["item"].weight
    indexed = batch.with_tokens(item_index=evaluator.items.id_map.rows(batch.tokens["item"]))
    return evaluator.model.states(table, indexed, SequenceLayout(batch.offsets))[-1], int(
        batch.tokens["target"][-1]
    )


def place_of(target, order):
    """Where a target stands in an order of items; far away where it is not recommended."""
    return order.index(target) if target in order else math.inf


def ranks_one_by_one(evaluator, examples, known):
    """Place of every user's target by a sort over the whole catalogue, as serving would answer."""
    catalog = examples.source.items.ids
    table = evaluator.items.embedding.tables["item"].weight
    vectors = evaluator.model.head.candidates(table[evaluator.items.id_map.rows(torch.from_numpy(catalog))])
    places = []
    for row, history in enumerate(examples.source.histories):
        if len(history) <= known:
            continue
        state, target = last_state(evaluator, examples, row)
        scores = dict(zip(catalog.tolist(), (vectors @ evaluator.model.head.queries(state)).tolist()))
        seen = set(history[: len(history) - known]) if evaluator.rule.filter_seen else set()
        order = sorted(scores.keys() - seen, key=lambda item: (-scores[item], item))
        places.append(place_of(target, order))
    return places


def assert_quality(got, places, cutoffs=(10, 50, 200)):
    assert list(got) == [f"{name}@{k}" for name in ("hr", "ndcg") for k in cutoffs] + ["mrr"]
    for k in cutoffs:
        assert got[f"hr@{k}"] == pytest.approx(np.mean([p < k for p in places]))
        assert got[f"ndcg@{k}"] == pytest.approx(np.mean([(p < k) / math.log2(p + 2) for p in places]))
    assert got["mrr"] == pytest.approx(np.mean([1 / (p + 1) for p in places]))


@pytest.mark.parametrize("filter_seen", [True, False])
@pytest.mark.parametrize(("split", "known"), [("valid", 2), ("test", 1)])
def test_metrics_are_those_of_a_sort_for_every_user(split, known, filter_seen):
    source = make_source(num_items=20)
    evaluator = make_evaluator(source, rule=Rule(filter_seen=filter_seen))
    examples = Examples(source=source, split=split, max_length=6)
    with torch.no_grad():
        places = ranks_one_by_one(evaluator, examples, known)
    assert len(places) < len(source.histories)
    assert (math.inf in places) == filter_seen
    assert_quality(evaluator.run(examples), places)


def test_a_target_that_was_seen_is_a_miss_where_seen_items_are_filtered():
    """Before, the filter spared the target itself: HR@10 0.81 where `recommend` gave 0.028."""
    source = ListSource([[1, 2, 3, 4, 1], [5, 6, 7, 8, 5]])
    examples = Examples(source=source, split="test", max_length=6)
    filtered = make_evaluator(source, rule=Rule(filter_seen=True)).run(examples)
    assert set(filtered.values()) == {0.0}
    assert set(popularity_quality(examples, rule=Rule(filter_seen=True)).values()) == {0.0}
    assert make_evaluator(source, rule=Rule(filter_seen=False)).run(examples)["hr@10"] == 1.0


def test_cutoffs_are_those_of_the_recipe():
    source = make_source()
    evaluator = make_evaluator(source, cutoffs=(1, 7))
    examples = Examples(source=source, split="test", max_length=6)
    with torch.no_grad():
        assert_quality(evaluator.run(examples), ranks_one_by_one(evaluator, examples, 1), (1, 7))


def test_hashed_ids_share_rows_and_are_still_ranked():
    source = make_source()
    evaluator = make_evaluator(source, id_map=HashMap(200), item_chunk=1000)
    examples = Examples(source=source, split="test", max_length=6)
    with torch.no_grad():
        assert_quality(evaluator.run(examples), ranks_one_by_one(evaluator, examples, 1))


def test_batches_and_chunks_change_nothing_and_max_users_takes_the_first():
    source = make_source()
    examples = Examples(source=source, split="test", max_length=6)
    first = make_evaluator(source, batch=1000, item_chunk=1000)
    assert make_evaluator(source, batch=1, item_chunk=1).run(examples) == pytest.approx(first.run(examples))
    with torch.no_grad():
        places = ranks_one_by_one(first, examples, 1)
    assert_quality(first.run(examples, max_users=3), places[:3])


def test_a_number_of_users_that_was_asked_for_is_kept_to():
    source = make_source()
    examples = Examples(source=source, split="valid", max_length=6)
    users = np.arange(len(source.lengths))
    for batch, wide, wanted in ((None, False, 256), (None, True, 1024), (5, False, 5), (5, True, 5)):
        evaluator = make_evaluator(source, batch=batch)
        assert evaluator._at_once(examples, users, ranks_targets=True, wide=wide) == wanted


def test_a_gpu_is_asked_about_more_users_where_they_are_short():
    short, long = np.full(5000, 137), np.full(5000, 900)
    assert users_at_once(short, scored=3_416, num_ranks=1) == (1 << 17) // 137
    assert users_at_once(long, scored=3_416, num_ranks=1) == 256
    assert users_at_once(np.full(9, 1), scored=3_416, num_ranks=1) == 1024
    assert users_at_once(short, scored=3_416, num_ranks=8) == 256
    assert users_at_once(short[:0], scored=1, num_ranks=1) == 1024
    assert users_at_once(short, scored=32_768, num_ranks=1) == 512, (
        "as many scores as of 256 users and 65,536 items"
    )
    assert users_at_once(short, scored=65_536, num_ranks=1) == 256


def test_the_model_is_left_in_the_mode_it_was_in():
    source = make_source()
    evaluator = make_evaluator(source)
    for training in (True, False):
        evaluator.model.train(training)
        evaluator.run(Examples(source=source, split="test", max_length=6))
        assert evaluator.model.training is training


RULES = (Rule(filter_seen=False), Rule(sampled=12, seed=1))


def run_sharded(rank: int, num_ranks: int) -> list[dict[str, float]]:
    ranks = Ranks(rank, num_ranks, CPU, group=dist.group.WORLD, control=dist.new_group(backend="gloo"))
    source = make_source()
    results = []
    for rule in RULES:
        evaluator = make_evaluator(source, ranks=ranks, rule=rule)
        results.append(evaluator.run(Examples(source=source, split="test", max_length=6)))
    for limit in (0.0, 1.0):
        for max_users in (None, 1):
            evaluator = make_evaluator(source, ranks=ranks, replicate_below_mb=limit)
            examples = Examples(source=source, split="test", max_length=6)
            results.append(evaluator.run(examples, max_users=max_users))
    head = RankingHead(dim=DIM, thresholds=(10.0, 20.0))
    evaluator = make_evaluator(source, ranks=ranks, head=head)
    results.append(evaluator.run(Examples(source=source, split="test", max_length=6)))
    return results


def run_alone() -> list[dict[str, float]]:
    source = make_source()
    examples = Examples(source=source, split="test", max_length=6)
    results = [make_evaluator(source, rule=rule).run(examples) for rule in RULES]
    results += [make_evaluator(source).run(examples, max_users=m) for m in (None, 1, None, 1)]
    return [
        *results,
        make_evaluator(source, head=RankingHead(dim=DIM, thresholds=(10.0, 20.0))).run(examples),
    ]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_gets_the_metrics_of_one(num_ranks):
    wanted = run_alone()
    for results in run_on_ranks(run_sharded, num_ranks, num_ranks):
        for got, alone in zip(results, wanted, strict=True):
            assert got == pytest.approx(alone, abs=1e-12)


def test_ranking_metrics_are_those_of_the_last_event_of_every_user():
    source = make_source()
    head = RankingHead(dim=DIM, thresholds=(10.0, 20.0))
    evaluator = make_evaluator(source, head=head)
    examples = Examples(source=source, split="test", max_length=6)
    pairs = []
    with torch.no_grad():
        for row, history in enumerate(source.histories):
            if len(history) > 1:
                state, target = last_state(evaluator, examples, row)
                item = evaluator.items.embedding.tables["item"].weight[
                    evaluator.items.id_map.rows(torch.tensor([target]))
                ]
                pairs.append((head.logits(state[None], item)[0, 1].item(), target / 2 > 20.0))
    got = evaluator.run(examples)
    losses = [math.log1p(math.exp(-x if y else x)) for x, y in pairs]
    assert got["logloss/1"] == pytest.approx(np.mean(losses))
    positive, negative = [x for x, y in pairs if y], [x for x, y in pairs if not y]
    wins = sum((p > n) + (p == n) / 2 for p in positive for n in negative)
    assert got["auc/1"] == pytest.approx(wins / len(positive) / len(negative), abs=1e-3)


@pytest.mark.parametrize("filter_seen", [True, False])
def test_popularity_ranks_by_training_counts_by_the_rule_of_the_model(filter_seen):
    source = make_source(num_items=20)
    catalog = source.items
    counts = dict(zip(catalog.ids.tolist(), catalog.train_counts.tolist()))
    places = []
    for history in source.histories:
        if len(history) > 1:
            seen = set(history[:-1]) if filter_seen else set()
            order = sorted(counts.keys() - seen, key=lambda item: (-counts[item], item))
            places.append(place_of(history[-1], order))
    examples, rule = Examples(source=source, split="test", max_length=6), Rule(filter_seen=filter_seen)
    assert_quality(popularity_quality(examples, rule=rule, batch=4), places)
    assert_quality(popularity_quality(examples, rule=rule, max_users=2, cutoffs=(3,)), places[:2], (3,))


def test_repeating_recommends_the_last_items_first():
    source = make_source(num_items=5)
    places = []
    for history in source.histories:
        if len(history) > 1:
            own = list(dict.fromkeys(reversed(history[:-1])))
            places.append(place_of(history[-1], own))
    assert {0, math.inf} < set(places)
    examples = Examples(source=source, split="test", max_length=6)
    keeps = Rule(filter_seen=False)
    assert_quality(repeat_quality(examples, rule=keeps, batch=4, cutoffs=(1, 3)), places, (1, 3))
    last = np.mean([h[-1] == h[-2] for h in source.histories if len(h) > 1])
    assert repeat_quality(examples, rule=keeps, cutoffs=(1,))["hr@1"] == pytest.approx(last)
    assert set(repeat_quality(examples, rule=Rule(filter_seen=True)).values()) == {0.0}


@pytest.mark.parametrize("filter_seen", [True, False])
def test_sampled_ranking_holds_the_target_against_a_few_items_that_are_always_the_same(filter_seen):
    source, num = make_source(num_items=60), 12
    rule = Rule(filter_seen=filter_seen, sampled=num, seed=3)
    examples = Examples(source=source, split="test", max_length=6)
    sampled = make_evaluator(source, rule=rule, cutoffs=(num, num + 1)).run(examples)
    whole = make_evaluator(source, rule=Rule(filter_seen=filter_seen), cutoffs=(num, num + 1)).run(examples)
    assert sampled[f"hr@{num}"] > whole[f"hr@{num}"]
    # All of 13 items but those that are hidden: only a target that was seen can be missed.
    seen = np.mean([h[-1] in h[:-1] for h in source.histories if len(h) > 1])
    assert sampled[f"hr@{num + 1}"] == pytest.approx(1 - seen * filter_seen)
    again = make_evaluator(source, rule=rule, cutoffs=(num, num + 1), batch=3, item_chunk=5).run(examples)
    assert again == pytest.approx(sampled)
    other = Rule(filter_seen=filter_seen, sampled=num, seed=4)
    assert make_evaluator(source, rule=other, cutoffs=(num,)).run(examples)["mrr"] != sampled["mrr"]
    assert 0 < popularity_quality(examples, rule=rule)["mrr"] < 1


class CountingHead(RetrievalHead):
    """Notes how many blocks of candidates there are at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.most, self.made = weakref.WeakSet(), 0, 0

    def candidates(self, rows):
        block = super().candidates(rows).clone()
        self.alive.add(block)
        self.most, self.made = max(self.most, len(self.alive)), self.made + 1
        return block


@pytest.mark.parametrize(("item_chunk", "most"), [(7, 2), (1000, 1)])
def test_candidates_are_not_kept_beside_the_table(item_chunk, most):
    """A second copy of all rows a rank holds is what a large table has no room for; one block alone is kept."""
    source, head = make_source(), CountingHead()
    evaluator = make_evaluator(source, head=head, item_chunk=item_chunk)
    metrics = evaluator.run(Examples(source=source, split="valid", max_length=6))
    assert head.most <= most
    assert head.made == 1 if most == 1 else head.made > 20
    assert metrics == make_evaluator(source).run(Examples(source=source, split="valid", max_length=6))
