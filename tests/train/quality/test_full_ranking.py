"""Ranks of targets against a sort for every user."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from freescale.comm.world.ranks import Ranks
from freescale.data.batches.examples import Examples
from freescale.model import NEVER
from freescale.train.quality.full_ranking import (
    FULL,
    Asked,
    ItemBlock,
    Pairs,
    Rule,
    gather_uneven,
    last_tokens,
    rank_of_targets,
)
from tests.effort import examples, slow
from tests.list_source import ListSource
from tests.ranks import run_on_ranks

DIM = 2


def by_sorting(scores: list[float], target: int, seen: set[int]) -> int:
    """Place of the target among what the user has not seen, best score first, then smallest number."""
    candidates = [i for i in range(len(scores)) if i not in seen]
    return NEVER if target in seen else sorted(candidates, key=lambda i: (-scores[i], i)).index(target)


def make_case(seed: int):
    """Users and items with small whole numbers in their vectors, so that products are exact and ties are many."""
    rng = random.Random(seed)
    num_items, num_users = rng.randint(1, 12), rng.randint(0, 6)

    def vectors(n):
        return (
            torch.tensor([[rng.randint(-2, 2) for _ in range(DIM)] for _ in range(n)]).double().view(n, DIM)
        )

    items, users = vectors(num_items), vectors(num_users)
    target = [rng.randrange(num_items) for _ in range(num_users)]
    seen = [rng.choices(range(num_items), k=rng.randint(0, num_items)) for _ in range(num_users)]
    return items, users, target, seen


def ask(users, target, seen) -> Asked:
    pairs = [(user, item) for user, items in enumerate(seen) for item in items]
    seen_user, seen_item = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous()
    return Asked(users, torch.tensor(target, dtype=torch.int64), Pairs(seen_user, seen_item))


def expected(items, users, target, seen) -> list[int]:
    scores = (users @ items.T).tolist()
    return [by_sorting(scores[u], target[u], set(seen[u])) for u in range(len(target))]


def block(items, numbers) -> ItemBlock:
    index = torch.tensor(numbers, dtype=torch.int64)
    return ItemBlock(numbers=index, vectors=items[index])


@examples(67, thorough=200)
@given(seed=st.integers(0, 10**6), chunk=st.sampled_from([1, 2, 3, 5, 100]))
def test_ranks_are_those_of_a_sort_with_ties_seen_items_and_any_chunks(seed, chunk):
    items, users, target, seen = make_case(seed)
    blocks = [block(items, range(a, min(a + chunk, len(items)))) for a in range(0, len(items), chunk)]
    assert rank_of_targets(ask(users, target, seen), blocks).tolist() == expected(items, users, target, seen)


@examples(17, thorough=200)
@given(st.integers(0, 10**6))
def test_a_block_without_items_changes_nothing(seed):
    items, users, target, seen = make_case(seed)
    blocks = [block(items, []), block(items, range(len(items)))]
    assert rank_of_targets(ask(users, target, seen), blocks).tolist() == expected(items, users, target, seen)


def test_nan_never_makes_a_hit():
    items = torch.eye(20, dtype=torch.float64)
    users = torch.zeros(3, 20, dtype=torch.float64)
    users[0, 4] = 1.0
    users[1] = float("nan")
    asked = ask(users, [4, 5, 6], [[0], [0], [0]])
    assert rank_of_targets(asked, [block(items, range(20))]).tolist() == [0, 18, 5]
    items[7] = float("nan")
    ranks = rank_of_targets(ask(users, [4, 5, 7], [[0], [0], [0]]), [block(items, range(20))]).tolist()
    assert ranks == [1, 18, 18]


def compare_many(rank: int, num_ranks: int, num_cases: int) -> int:
    ranks = Ranks(rank, num_ranks, torch.device("cpu"), group=dist.group.WORLD)
    compared = 0
    for seed in range(num_cases):
        items, users, target, seen = make_case(seed)
        rng = random.Random(seed)
        # Both users and items fall to ranks at random; some ranks get none.
        owner = [rng.randrange(num_ranks) for _ in range(len(items))]
        asker = sorted(rng.randrange(num_ranks) for _ in target)
        mine = [u for u, r in enumerate(asker) if r == rank]
        held = [i for i, r in enumerate(owner) if r == rank]
        chunk = rng.choice([1, 3, 100])
        blocks = [block(items, held[a : a + chunk]) for a in range(0, max(1, len(held)), chunk)]
        asked = ask(users[mine], [target[u] for u in mine], [seen[u] for u in mine])
        everybody = asked.gather(ranks)
        got = rank_of_targets(everybody, blocks, ranks)[everybody.own_part(rank)].tolist()
        wanted = expected(items, users, target, seen)
        assert got == [wanted[u] for u in mine], f"case {seed}"
        compared += len(mine)
    return compared


@pytest.mark.parametrize(("num_ranks", "num_cases"), [(3, 40), slow(2, 150), slow(3, 150)])
def test_items_and_users_spread_over_ranks_give_the_same_ranks(num_ranks, num_cases):
    assert min(run_on_ranks(compare_many, num_ranks, num_ranks, num_cases)) > num_cases / 3


def gather_all(rank: int) -> list[object]:
    ranks = Ranks(rank, 3, torch.device("cpu"), group=dist.group.WORLD)
    results = []
    for sizes in ([2, 0, 3], [0, 0, 0], [1, 1, 1]):
        values = torch.arange(sizes[rank] * 2).view(-1, 2) + 100 * rank
        gathered, counts = gather_uneven(values, ranks)
        results.append((gathered.tolist(), counts))
    return results


def test_uneven_parts_are_gathered_in_rank_order():
    for uneven, empty, even in run_on_ranks(gather_all, 3):
        assert uneven == ([[0, 1], [2, 3], [200, 201], [202, 203], [204, 205]], [2, 0, 3])
        assert empty == ([], [0, 0, 0])
        assert even == ([[0, 1], [100, 101], [200, 201]], [1, 1, 1])


def test_the_question_for_a_batch_names_targets_and_seen_items_by_catalogue_number():
    source = ListSource([[10, 30, 20, 40], [40, 30]])
    examples = Examples(source=source, split="test", max_length=2)
    rows = np.array([1, 0])
    batch = examples.batch(rows)
    assert last_tokens(batch).tolist() == [0, 2]
    vectors = torch.zeros(2, DIM)
    asked = Asked.of(examples, rows, batch, vectors, torch.device("cpu"), FULL)
    assert asked.target.tolist() == [2, 3]
    hidden = list(zip(asked.hidden.user.tolist(), asked.hidden.item.tolist()))
    assert hidden == [(0, 3), (1, 0), (1, 2), (1, 1)]
    assert asked.never.tolist() == [False, False]
    kept = Asked.of(examples, rows, batch, vectors, torch.device("cpu"), Rule(filter_seen=False))
    assert len(kept.hidden.user) == 0


def test_items_to_rank_among_are_distinct_unseen_and_not_the_target():
    rng = random.Random(1)
    source = ListSource([[*range(1, 41)], *([rng.randint(1, 40) for _ in range(10)] for _ in range(30))])
    examples, rows = Examples(source=source, split="test"), np.arange(1, 31)
    asked = Asked.of(
        examples,
        rows,
        examples.batch(rows),
        torch.zeros(30, DIM),
        torch.device("cpu"),
        Rule(sampled=8, seed=2),
    )
    catalog = source.items.ids
    for user, row in enumerate(rows):
        drawn = catalog[asked.among.item[asked.among.user == user].numpy()].tolist()
        assert len(set(drawn)) == len(drawn) == 8
        assert not set(drawn) & set(source.histories[row])
