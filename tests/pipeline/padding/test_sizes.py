"""Sizes foreseen from the plan: few, as cheap as they can be, the same for everybody who asks, and enough for a run."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance import BalancedSampler
from freescale.data import TokenRule
from freescale.kernels import LayoutRoom
from freescale.kernels.attention import is_long, pair_blocks
from freescale.pipeline import PaddingSizes, RowCounts, foresee_sizes, padded_size
from freescale.pipeline.padding.sizes import LARGE_BATCHES, MOST_SIZES, SMALL_BATCHES, PairLimit, choose_sizes
from freescale.pipeline.padding.source import longer_room

TABLE_ROWS = 5000


def rows_of(plan):
    return RowCounts({"item": len(plan.rows)})


@pytest.mark.parametrize(("scale", "grain"), [(1, SMALL_BATCHES), (40, LARGE_BATCHES)])
@given(drawn=st.lists(st.integers(0, 3000), min_size=1, max_size=12))
def test_no_other_sizes_cost_less(scale, grain, drawn):
    tokens = [scale * num for num in drawn] + ([90_000] if grain is LARGE_BATCHES else [])
    needed = [padded_size(num, steps=grain.steps) for num in tokens]

    def cost(sizes):
        places = sum(min(size for size in sizes if size >= num) for num in needed)
        return places + len(sizes) * sum(needed) / grain.price

    *smaller, largest = sorted(set(needed))
    others = [(*few, largest) for count in range(len(smaller) + 1) for few in combinations(smaller, count)]
    assert cost(choose_sizes(tokens)) == pytest.approx(min(cost(sizes) for sizes in others))


@given(st.lists(st.integers(1, 10**5), min_size=1, max_size=6, unique=True), st.integers(0, 10**6))
def test_a_batch_takes_the_smallest_size_that_holds_it(sizes, num):
    chosen = PaddingSizes(tokens=tuple(sorted(sizes)), samples=40, rows={"item": 300})
    holding = [size for size in sizes if size >= num]
    assert chosen.tokens_for(num) == (min(holding) if holding else padded_size(num, steps=4))
    assert chosen.samples_for(num) >= num
    assert chosen.rows_for("item", min(num, TABLE_ROWS), table_rows=TABLE_ROWS) > min(num, TABLE_ROWS)


def test_without_foresight_sizes_lie_a_sixteenth_apart():
    assert PaddingSizes().tokens_for(9000) == padded_size(9000)
    assert PaddingSizes().samples_for(90) == padded_size(90, fewest=8)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_nearly_every_batch_of_a_long_run_has_a_size_that_was_foreseen(num_ranks):
    lengths = np.clip(6 * (1 + np.random.default_rng(5).pareto(1.3, 6000)), 2, 900).astype(np.int64)
    for rank in range(num_ranks):
        asked = []
        sampler = BalancedSampler(lengths, global_batch=192, num_ranks=num_ranks, rank=rank, seed=3)
        sizes = foresee_sizes(
            sampler,
            rows_of=lambda plan, asked=asked: asked.append(plan) or rows_of(plan),
            table_rows={"item": TABLE_ROWS},
        )
        assert len(asked) == 1, "one batch is read, no more"
        assert 2 <= len(sizes.tokens) <= 10
        again = BalancedSampler(lengths, global_batch=192, num_ranks=num_ranks, rank=rank, seed=3)
        assert foresee_sizes(again, rows_of=rows_of, table_rows={"item": TABLE_ROWS}) == sizes
        places, tokens, foreseen, steps = 0, 0, 0, 120
        for plan in sampler.plans(0, steps):
            num = int(lengths[plan.rows].sum())
            size = sizes.tokens_for(num)
            foreseen += sizes.holds(tokens=size, samples=sizes.samples_for(len(plan.rows)), rows=sizes.rows)
            places, tokens = places + size, tokens + num
        assert foreseen >= 0.98 * steps
        assert places < 1.12 * tokens


def heavy_tail(num, *, most, seed=5):
    return np.clip(300 * (1 + np.random.default_rng(seed).pareto(1.6, num)), 2, most).astype(np.int64)


def test_large_batches_have_few_pads_and_room_for_the_pairs_they_have():
    """Room for any lengths up to 8,192 would be more than gradients are kept for."""
    lengths = heavy_tail(6000, most=8192)
    sampler = BalancedSampler(lengths, global_batch=4 * 60, num_ranks=4, rank=1, seed=3)
    limit = PairLimit(8192, longest=8192)
    sizes = foresee_sizes(sampler, rows_of=rows_of, table_rows={"item": TABLE_ROWS}, pairs=limit)
    assert not limit.hold(tokens=sizes.tokens[-1], samples=sizes.samples)
    assert limit.hold(tokens=sizes.tokens[-1], samples=sizes.samples, blocks=sizes.blocks)
    places, tokens, foreseen, steps, rooms = 0, 0, 0, 90, set()
    for plan in sampler.plans(0, steps):
        own = lengths[plan.rows]
        room = sizes.room_for(own, longest=8192)
        assert room.blocks >= pair_blocks(own)
        foreseen += sizes.holds(
            tokens=room.tokens, samples=sizes.samples_for(len(own)), rows=sizes.rows, blocks=room.blocks
        )
        rooms.add(room)
        places, tokens = places + room.tokens, tokens + int(own.sum())
    assert tokens > 32_768 * steps
    assert foreseen >= 0.97 * steps
    assert places < 1.03 * tokens
    # Lengths as a token sees them lie on both sides of what counts as long; one size must not be two for that.
    assert len({is_long(lengths[plan.rows]) for plan in sampler.plans(0, steps)}) == 2
    assert len({room.long for room in rooms}) == 1


def test_the_short_last_step_of_an_epoch_has_a_size_where_it_comes_often():
    """Padded up to the others, it made 2 % pads of a run with 24 steps an epoch."""
    lengths = heavy_tail(6000, most=4096)
    sampler = BalancedSampler(lengths, global_batch=256, num_ranks=1, rank=0, seed=3)
    sizes = foresee_sizes(sampler, rows_of=rows_of, table_rows={"item": TABLE_ROWS})
    tokens = [int(lengths[plan.rows].sum()) for plan in sampler.plans(0, 96)]
    short = [num for num in tokens if num < 0.7 * max(tokens)]
    assert len(short) == 4
    assert sum(map(sizes.tokens_for, short)) < 1.2 * sum(short)
    assert sum(map(sizes.tokens_for, tokens)) < 1.02 * sum(tokens)


def test_a_rank_without_tokens_in_last_steps_takes_the_kernels_of_the_others():
    """33 histories in batches of 32: the last step has one, and seven of eight ranks nothing."""
    lengths = np.random.default_rng(4).integers(4000, 8000, 33)
    long = []
    for rank in range(8):
        sampler = BalancedSampler(lengths, global_batch=32, num_ranks=8, rank=rank, seed=3)
        long.append(foresee_sizes(sampler, rows_of=rows_of, table_rows={"item": TABLE_ROWS}).long)
    assert long == [True] * 8


def test_sizes_are_never_more_than_can_be_recorded():
    spread = np.random.default_rng(2).integers(40_000, 260_000, 64).tolist()
    chosen = choose_sizes(spread)
    assert 12 < len(chosen) <= MOST_SIZES
    assert chosen[-1] >= max(spread)


def test_batches_with_more_pairs_than_are_kept_have_no_sizes():
    lengths = heavy_tail(3000, most=8192)
    sampler = BalancedSampler(lengths, global_batch=240, num_ranks=4, rank=0, seed=3)

    def foreseen(most):
        limit = PairLimit(most, longest=8192)
        return foresee_sizes(sampler, rows_of=rows_of, table_rows={"item": TABLE_ROWS}, pairs=limit)

    seen = [pair_blocks(lengths[plan.rows]) for plan in sampler.plans(0, 64)]
    assert foreseen(10**6).blocks == 0, "any lengths have room"
    assert foreseen(max(seen)).blocks == max(seen)
    assert foreseen(max(seen) - 1).blocks < max(seen), "the few largest are computed as usual"
    assert foreseen(min(seen)) is None


@given(
    most=st.integers(1, 20_000),
    samples=st.integers(1, 300),
    tokens=st.integers(64, 10**5),
    rule=st.builds(TokenRule, front=st.integers(0, 300), after=st.integers(0, 2)) | st.none(),
)
def test_the_largest_room_is_kept_and_none_larger(most, samples, tokens, rule):
    limit = PairLimit(most, longest=4096, rule=rule)
    if limit.hold(tokens=tokens, samples=samples):
        return
    blocks = limit.largest(tokens=tokens, samples=samples)
    assert not blocks or limit.hold(tokens=tokens, samples=samples, blocks=blocks)
    assert not limit.hold(tokens=tokens, samples=samples, blocks=blocks + 1)


@given(
    lengths=st.lists(st.integers(0, 2000), min_size=1, max_size=40),
    front=st.integers(0, 300),
    after=st.integers(0, 2),
    spare=st.integers(0, 50),
)
def test_bounded_rooms_hold_all_pairs_of_tiles(lengths, front, after, spare):
    lengths = np.array(lengths)
    bounded = LayoutRoom(int(lengths.sum()) + 1, 2000, max(1, pair_blocks(lengths) + spare))
    rule = TokenRule(front=front, after=after)
    for own, room in ((lengths, bounded), (rule.tokens(lengths), longer_room(bounded, len(lengths), rule))):
        assert own.sum() <= room.tokens
        assert room.blocks >= pair_blocks(own)
        for block in (32, 64, 128):
            tiles = -(-own // block)
            assert room.pairs(len(own), block) >= int((tiles * (tiles + 1) // 2).sum())
