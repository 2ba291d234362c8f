"""The sampler: ranks agree without talking, every sample once, exact resume, ordinary DataLoaders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from freescale.balance import BalancedSampler, CostModel, GlobalBatches
from freescale.balance.work import SampleWork
from freescale.data.batches.segment_rule import SegmentRule
from freescale.errors import CheckpointError, PlanError
from tests.effort import examples


def long_tailed(num_rows: int, *, seed: int = 0) -> np.ndarray:
    lengths = np.exp(np.random.default_rng(seed).normal(np.log(100), 1.0, num_rows))
    return np.minimum(lengths, 2000).astype(np.int64)


@st.composite
def recipes(draw):
    lengths = draw(st.lists(st.integers(0, 500), min_size=1, max_size=80))
    recipe = {
        "seed": draw(st.integers(0, 1000)),
        "window": draw(st.sampled_from([1, 3])),
        "balanced": draw(st.booleans()),
    }
    key = draw(st.sampled_from(["global_batch", "global_tokens"]))
    recipe[key] = draw(st.integers(1, 30 if key == "global_batch" else 3000))
    return lengths, recipe


@examples(27, thorough=200)
@given(recipes(), st.integers(1, 9))
def test_ranks_agree_and_together_cover_every_sample_once(case, num_ranks):
    lengths, recipe = case
    samplers = [
        BalancedSampler(lengths, num_ranks=num_ranks, rank=rank, **recipe) for rank in range(num_ranks)
    ]
    alone = BalancedSampler(lengths, num_ranks=1, rank=0, **recipe)
    seen: list[int] = []
    for step in range(len(alone)):
        plans = [sampler.plan(step) for sampler in samplers]
        assert len({plan.plan_hash for plan in plans}) == 1
        assert (
            len({(plan.imbalance, plan.bound, plan.global_samples, plan.global_tokens) for plan in plans})
            == 1
        )
        rows = sorted(np.concatenate([plan.rows for plan in plans]).tolist())
        assert rows == sorted(alone.plan(step).rows.tolist())
        assert plans[0].global_samples == len(rows)
        assert plans[0].global_tokens == sum(lengths[row] for row in rows)
        seen += rows
    assert sorted(seen) == list(range(len(lengths)))


@examples(20, thorough=200)
@given(recipes(), st.integers(1, 5), st.integers(0, 12))
def test_resume_continues_the_same_sequence_on_any_number_of_ranks(case, num_ranks, stop_after):
    lengths, recipe = case
    whole = BalancedSampler(lengths, num_ranks=num_ranks, rank=0, num_steps=24, **recipe)
    expected = list(whole)
    first = BalancedSampler(lengths, num_ranks=num_ranks, rank=0, num_steps=24, **recipe)
    iterator = iter(first)
    head = [next(iterator) for _ in range(stop_after)]
    state = first.state_dict()
    assert state["step"] == stop_after
    second = BalancedSampler(lengths, num_ranks=num_ranks, rank=0, num_steps=24, **recipe)
    second.load_state_dict(state)
    assert len(second) == 24 - stop_after
    assert head + list(second) == expected
    others = [BalancedSampler(lengths, num_ranks=3, rank=rank, **recipe) for rank in range(3)]
    for other in others:
        other.load_state_dict(state)
        assert other.state_dict()["step"] == stop_after
    together = sorted(row for other in others for row in next(iter(other)))
    assert together == sorted(whole.batches.batch(stop_after).tolist())


def test_mid_epoch_resume_then_the_next_epoch():
    lengths = long_tailed(100)
    kwargs = {"global_batch": 16, "num_ranks": 2, "rank": 1}
    straight = BalancedSampler(lengths, **kwargs)
    epochs = [list(straight) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [7, 7, 7]
    assert epochs[0] != epochs[1]
    stopped = BalancedSampler(lengths, **kwargs)
    list(stopped)
    iterator = iter(stopped)
    got = [next(iterator) for _ in range(3)]
    resumed = BalancedSampler(lengths, **kwargs)
    resumed.load_state_dict(stopped.state_dict())
    for epoch in range(1, 3):
        resumed.set_epoch(epoch)
        got += list(resumed)
    assert got == epochs[1] + epochs[2]


def test_set_epoch_goes_back_and_forth_and_a_broken_loop_starts_again():
    sampler = BalancedSampler(long_tailed(50), global_batch=8, num_ranks=2, rank=0)
    first = list(sampler)
    second = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1)
    for _ in sampler:
        break
    assert list(sampler) == second


def test_state_of_steps_trained_not_of_batches_asked_for():
    sampler = BalancedSampler(long_tailed(64), global_batch=8, num_ranks=2, rank=0)
    list(sampler)
    assert sampler.state_dict(step=3)["step"] == 3
    assert sampler.state_dict(step=3)["epoch"] == 0
    assert sampler.state_dict()["epoch"] == 1


def test_state_keeps_what_was_measured_where_the_ranks_match():
    model = CostModel(fixed_ms=1.0, per_sample_ms=0.1, per_token_ms=0.01, per_square_ms=1e-6)
    sampler = BalancedSampler(long_tailed(64), global_batch=16, num_ranks=2, rank=0)
    sampler.set_cost_model(model)
    sampler.set_speeds([1.0, 0.5])
    same = BalancedSampler(long_tailed(64), global_batch=16, num_ranks=2, rank=0)
    same.load_state_dict(sampler.state_dict())
    assert same.plan(0).plan_hash == sampler.plan(0).plan_hash
    more = BalancedSampler(long_tailed(64), global_batch=16, num_ranks=3, rank=0)
    more.load_state_dict(sampler.state_dict())
    assert more.speeds is None
    assert more.cost_model == model


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"global_batch": 16},
        {"drop_last": True},
        {"window": 4},
        {"groups": [32, 32], "shuffle_rows": 8},
    ],
)
def test_a_position_in_other_batches_is_refused(change):
    recipe = {"global_batch": 8, "num_ranks": 2, "rank": 0}
    state = BalancedSampler(long_tailed(64), **recipe).state_dict()
    with pytest.raises(CheckpointError, match=next(iter(change))):
        BalancedSampler(long_tailed(64), **{**recipe, **change}).load_state_dict(state)
    with pytest.raises(CheckpointError, match="num_rows"):
        BalancedSampler(long_tailed(65), **recipe).load_state_dict(state)
    with pytest.raises(CheckpointError, match="not the state"):
        BalancedSampler(long_tailed(64), **recipe).load_state_dict({"position": 3})


def test_balanced_evens_out_what_random_does_not():
    lengths = long_tailed(32 * 8 * 4)
    balanced = BalancedSampler(lengths, global_batch=256, num_ranks=8, rank=0)
    plain = BalancedSampler(lengths, global_batch=256, num_ranks=8, rank=0, balanced=False)
    for one, other in zip(balanced.plans(0, 4), plain.plans(0, 4)):
        assert one.imbalance < 1.01 < 1.05 < other.imbalance
        assert one.bound == pytest.approx(other.bound)
        assert one.global_tokens == other.global_tokens
        assert len(other.rows) == 32


def test_unbalanced_counts_differ_by_at_most_one_and_follow_position():
    sampler = BalancedSampler(long_tailed(50), global_batch=11, num_ranks=4, rank=1, balanced=False)
    batches = GlobalBatches(long_tailed(50), global_batch=11)
    assert sampler.plan(2).rows.tolist() == batches.batch(2)[1::4].tolist()


def test_more_ranks_than_samples_leaves_some_without():
    samplers = [BalancedSampler([5, 6, 7], global_batch=3, num_ranks=8, rank=rank) for rank in range(8)]
    assert sorted(len(sampler.plan(0).rows) for sampler in samplers) == [0] * 5 + [1] * 3
    assert samplers[0].plan(0).bound > 2


def test_token_cap_and_speeds_reach_the_plan():
    lengths = long_tailed(512)
    samplers = [BalancedSampler(lengths, global_batch=512, num_ranks=4, rank=rank) for rank in range(4)]
    tokens = [lengths[sampler.plan(0).rows].sum() for sampler in samplers]
    assert max(tokens) <= 1.10 * np.mean(tokens) + 1
    slow = [
        BalancedSampler(lengths, global_batch=512, num_ranks=4, rank=rank, speeds=[1, 1, 1, 0.5])
        for rank in range(4)
    ]
    model = CostModel.default()
    loads = [model.cost(lengths[sampler.plan(0).rows]).sum() for sampler in slow]
    assert loads[3] == pytest.approx(loads[0] / 2, rel=0.02)


def test_plans_run_on_over_epochs():
    sampler = BalancedSampler(long_tailed(20), global_batch=8, num_ranks=2, rank=0)
    plans = list(sampler.plans(2, 4))
    assert [(plan.step, plan.epoch) for plan in plans] == [(2, 0), (3, 1), (4, 1), (5, 1)]


class Histories(Dataset):
    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        return row, torch.full((int(self.lengths[row]),), float(row))


def jagged(samples: list[tuple[int, torch.Tensor]]) -> tuple[list[int], torch.Tensor]:
    return [row for row, _ in samples], torch.cat([values for _, values in samples])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_ordinary_data_loader_takes_it_as_batch_sampler(num_workers):
    lengths = long_tailed(96)
    seen: list[int] = []
    for rank in range(2):
        sampler = BalancedSampler(lengths, global_batch=16, num_ranks=2, rank=rank)
        loader = DataLoader(
            Histories(lengths), batch_sampler=sampler, collate_fn=jagged, num_workers=num_workers
        )
        assert len(loader) == 6
        for step, (rows, values) in enumerate(loader):
            assert rows == sampler.plan(step).rows.tolist()
            assert len(values) == lengths[rows].sum()
            seen += rows
    assert sorted(seen) == list(range(96))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_ranks": 0, "rank": 0}, "at least one rank"),
        ({"num_ranks": 2, "rank": 2}, "rank 2 of 2"),
        ({"num_ranks": 2, "rank": -1}, "rank -1 of 2"),
        ({"num_ranks": 2, "rank": 0, "max_tokens_ratio": 0.9}, "at least the mean"),
        ({"num_ranks": 2, "rank": 0, "start_step": -1}, "negative"),
        ({"num_ranks": 2, "rank": 0, "speeds": [1.0]}, "one number a rank"),
    ],
)
def test_bad_settings_are_refused(kwargs, message):
    with pytest.raises(PlanError, match=message):
        BalancedSampler([1, 2, 3], global_batch=2, **kwargs)


def test_costs_count_the_pairs_that_a_mask_leaves():
    """Long samples in segments cost little more than their tokens: planned so, ranks finish together."""
    rule = SegmentRule(recent=50, length=100, summaries=4)
    lengths = np.append(np.full(300, 100), 2000)
    model = CostModel(fixed_ms=0, per_sample_ms=0, per_token_ms=0, per_square_ms=1e-6)

    def loads(work):
        samplers = [
            BalancedSampler(
                lengths,
                global_batch=301,
                num_ranks=4,
                rank=rank,
                cost_model=model,
                work=work,
                max_tokens_ratio=None,
            )
            for rank in range(4)
        ]
        true = SampleWork(rule).squares(lengths)
        return np.array([true[sampler.plan(0).rows].sum() for sampler in samplers])

    seen, blind = loads(SampleWork(rule)), loads(SampleWork())
    assert seen.max() / seen.mean() < 1.02
    assert blind.max() / blind.mean() > 1.05
    assert SampleWork(rule).squares(np.array([50]))[0] == 2500


def test_token_caps_count_summaries():
    rule = SegmentRule(recent=1, length=1, summaries=9)
    lengths = np.array([11, 11, 50, 50])
    sampler = BalancedSampler(
        lengths, global_batch=4, num_ranks=2, rank=0, work=SampleWork(rule), max_tokens_ratio=1.0
    )
    plan = sampler.plan(0)
    assert sorted(lengths[plan.rows].tolist()) == [11, 50]
    assert plan.global_tokens == 122


@pytest.mark.parametrize(
    "batch",
    [
        {"global_batch": 64},
        {"global_tokens": 6000},
        {"global_batch": 64, "window": 4},
        {"global_batch": 64, "window": 16},
        {"global_batch": 9000},
    ],
)
@pytest.mark.parametrize("balanced", [False, True])
def test_usual_tokens_are_those_of_nearly_all_steps(batch, balanced):
    lengths = np.random.default_rng(0).lognormal(4, 1, 5000).astype(int) + 1
    sampler = BalancedSampler(lengths, **batch, num_ranks=4, rank=1, balanced=balanced)
    fewest, most = sampler.usual_tokens()
    tokens = [int(lengths[sampler.plan(step).rows].sum()) for step in range(70)]
    assert sum(fewest <= count <= most for count in tokens) >= 67
    assert most < 3 * np.max(tokens)
    half = sampler.usual_tokens(parts=2)
    assert half[1] < 0.75 * most


def test_usual_tokens_include_the_short_step_that_ends_an_epoch():
    lengths = np.full(100, 10)
    kept, dropped = (
        BalancedSampler(lengths, global_batch=32, num_ranks=2, rank=0, drop_last=drop)
        for drop in (False, True)
    )
    assert kept.usual_tokens() == (20, 160)
    assert dropped.usual_tokens() == (160, 160)


def _of_group(rank: int) -> tuple[int, int]:
    sampler = BalancedSampler([1, 2, 3, 4], global_batch=4)
    return sampler.num_ranks, sampler.rank


def test_ranks_come_from_torch_distributed_unless_given() -> None:
    from tests.ranks import run_on_ranks

    assert run_on_ranks(_of_group, 2) == [(2, 0), (2, 1)]
    alone = BalancedSampler([1, 2], global_batch=2)
    assert (alone.num_ranks, alone.rank) == (1, 0)
