"""Balancers by name, as objects and from outside: every sample on one rank, the same plans as before on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance import BalancedSampler, assignment_report, karmarkar_karp_equal, partition_report
from freescale.balance.step_plan import assign, named_balancer
from freescale.errors import ConfigError, PlanError
from freescale.registry import load_plugin, register
from tests.effort import examples
from tests.ranks import run_on_ranks

COSTS = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=60)
LENGTHS = np.minimum(np.exp(np.random.default_rng(3).normal(5, 1, 900)), 2000).astype(np.int64)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, own_kinds: None) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sys.modules.pop("own_balancer", None)
    load_plugin("own_balancer")
    yield
    sys.modules.pop("own_balancer", None)


@st.composite
def problems(draw):
    costs = np.array(draw(COSTS))
    tokens = np.array(draw(st.lists(st.integers(0, 999), min_size=len(costs), max_size=len(costs))))
    num_ranks = draw(st.integers(1, 9))
    speeds = draw(st.none() | st.lists(st.floats(0.5, 2), min_size=num_ranks, max_size=num_ranks))
    return costs, {
        "tokens": tokens,
        "num_ranks": num_ranks,
        "max_tokens_ratio": draw(st.sampled_from([None, 1.0, 1.1, 3.0])),
        "speeds": None if speeds is None else np.array(speeds),
    }


class OnlyLists:
    """The default without its report."""

    def assign(self, *costs, **given):
        return named_balancer("lpt").assign(*costs, **given)


@examples(50, thorough=200)
@given(problems())
def test_longest_first_is_the_partition_to_the_last_bit(problem):
    costs, options = problem
    plan = assign(costs, balancer=named_balancer("lpt"), **options)
    if options["num_ranks"] > 1:
        wanted = partition_report(costs, **options)
        lists = assign(costs, balancer=OnlyLists(), **options)
        assert (lists.owner.tolist(), lists.imbalance) == (plan.owner.tolist(), plan.imbalance)
        assert plan.owner.tolist() == wanted.owner.tolist()
        assert (plan.imbalance, plan.bound, plan.reason) == (wanted.imbalance, wanted.bound, wanted.reason)
        assert plan.times.tolist() == wanted.times.tolist()
    else:
        assert not plan.owner.any()


@examples(20, thorough=200)
@given(problems())
def test_in_turn_and_equal_counts(problem):
    costs, options = problem
    num_ranks = options["num_ranks"]
    in_turn = assign(costs, balancer=named_balancer("round_robin"), **options)
    assert in_turn.owner.tolist() == [sample % num_ranks for sample in range(len(costs))]
    equal = assign(costs, balancer=named_balancer("karmarkar_karp"), **options)
    assert equal.counts.max() - equal.counts.min() <= 1
    if len(costs) % num_ranks == 0:
        parts = karmarkar_karp_equal(costs, num_ranks)
        assert [part.tolist() for part in equal.ranks] == [part.tolist() for part in parts]


@pytest.mark.parametrize("name", ["lpt", "round_robin", "karmarkar_karp"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_sampler_takes_a_name(name, num_ranks):
    samplers = [
        BalancedSampler(LENGTHS, global_batch=64, num_ranks=num_ranks, rank=rank, balancer=name)
        for rank in range(num_ranks)
    ]
    plans = [sampler.plan(2) for sampler in samplers]
    assert len({plan.plan_hash for plan in plans}) == 1
    rows = np.sort(np.concatenate([plan.rows for plan in plans]))
    assert rows.tolist() == np.sort(samplers[0].batches.batch(2)).tolist()


def test_balanced_means_the_two_balancers_it_always_meant():
    def hashes(**options):
        sampler = BalancedSampler(LENGTHS, global_batch=64, num_ranks=4, rank=1, **options)
        return [plan.plan_hash for plan in sampler.plans(0, 5)]

    assert hashes() == hashes(balanced=True) == hashes(balancer="lpt")
    assert hashes(balanced=False) == hashes(balancer="round_robin") != hashes()
    # What these plans were before balancers had names.
    assert hashes()[0] == "7a8ea66e9daff67a"
    assert hashes(balanced=False)[0] == "a2aabd4254a014c4"
    with pytest.raises(PlanError, match="balanced=False names a balancer"):
        hashes(balanced=False, balancer="lpt")


def test_names_that_are_none_and_objects_that_are_none():
    with pytest.raises(
        ConfigError, match=r"(?s)no balancer 'ltp'.*karmarkar_karp, lpt, padded, round_robin.*'lpt'"
    ):
        BalancedSampler(LENGTHS, global_batch=64, num_ranks=2, rank=0, balancer="ltp")
    with pytest.raises(PlanError, match="needs a method `assign`"):
        BalancedSampler(LENGTHS, global_batch=64, num_ranks=2, rank=0, balancer=object())


class Gives:
    def __init__(self, parts):
        self.parts = parts

    def assign(self, costs, num_ranks, *, tokens, max_tokens, speeds):
        return self.parts


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1, 2]], "one list of samples a rank"),
        ([[0, 1], []], "exactly one rank"),
        ([[0, 1], [1]], "exactly one rank"),
        ([[0, 1], [3]], "exactly one rank"),
        ([[0, 1], [-1]], "exactly one rank"),
        ([[0, 0.5], [2]], "exactly one rank"),
        ([["a", "b"], ["c"]], "exactly one rank"),
    ],
)
def test_an_assignment_that_loses_or_doubles_samples_is_refused(parts, message):
    with pytest.raises(PlanError, match=message):
        assign(
            np.ones(3),
            tokens=np.ones(3, int),
            num_ranks=2,
            balancer=Gives(parts),
            max_tokens_ratio=1.1,
            speeds=None,
        )


def test_an_empty_rank_is_allowed_and_the_cap_reaches_the_balancer():
    asked = {}

    class Asks(Gives):
        def assign(self, costs, num_ranks, **given):
            asked.update(given)
            return self.parts

    tokens = np.array([10, 20, 30])
    plan = assign(
        np.ones(3),
        tokens=tokens,
        num_ranks=2,
        balancer=Asks([[], [2, 0, 1]]),
        max_tokens_ratio=1.5,
        speeds=None,
    )
    assert plan.owner.tolist() == [1, 1, 1]
    assert asked["max_tokens"] == 45
    assert asked["tokens"].tolist() == tokens.tolist()
    assert asked["speeds"].tolist() == [1, 1]
    same = assignment_report(np.ones(3), np.array([1, 1, 1]), 2, tokens=tokens)
    assert (plan.imbalance, plan.tokens.tolist()) == (same.imbalance, [0, 60])


def _rows_of_a_rank(rank, num_ranks, plugin_folder):
    sys.path.insert(0, plugin_folder)
    load_plugin("own_balancer")
    sampler = BalancedSampler(
        LENGTHS, global_batch=50, num_ranks=num_ranks, rank=rank, balancer="least_loaded"
    )
    return [(plan.plan_hash, plan.imbalance, plan.rows.tolist()) for plan in sampler.plans(0, 4)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_balancer_from_outside_on_real_ranks(num_ranks):
    results = run_on_ranks(_rows_of_a_rank, num_ranks, num_ranks, str(Path(__file__).parent))
    batches = BalancedSampler(LENGTHS, global_batch=50, num_ranks=1, rank=0).batches
    for step, plans in enumerate(zip(*results)):
        assert len({(plan_hash, imbalance) for plan_hash, imbalance, _ in plans}) == 1
        together = sorted(row for _, _, rows in plans for row in rows)
        assert together == sorted(batches.batch(step).tolist())
        in_turn = BalancedSampler(LENGTHS, global_batch=50, num_ranks=num_ranks, rank=0, balanced=False).plan(
            step
        )
        assert num_ranks == 1 or plans[0][1] < in_turn.imbalance


def test_a_balancer_from_outside_knows_speeds(outside):
    sampler = BalancedSampler(
        LENGTHS, global_batch=200, num_ranks=2, rank=0, balancer="least_loaded", speeds=[2.0, 1.0]
    )
    share = LENGTHS[sampler.plan(0).rows].sum() / sampler.plan(0).global_tokens
    assert 0.6 < share < 0.75


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    start: int = 0


class FromRank:
    """Everything to one rank."""

    def __init__(self, options: StartOptions) -> None:
        self.start = options.start

    def assign(self, costs, num_ranks, *, tokens, max_tokens, speeds):
        return [list(range(len(costs))) if rank == self.start else [] for rank in range(num_ranks)]


def test_a_balancer_with_options_is_made_by_its_name(own_kinds: None) -> None:
    register("balancer", "from_rank", options=StartOptions)(FromRank)
    for options, busy in ((None, 0), ({"start": 1}, 1), (StartOptions(start=1), 1)):
        sampler = BalancedSampler(
            LENGTHS, global_batch=8, num_ranks=2, rank=busy, balancer=named_balancer("from_rank", options)
        )
        assert len(sampler.plan(0).rows) == 8
    assert (
        len(BalancedSampler(LENGTHS, global_batch=8, num_ranks=2, rank=0, balancer="from_rank").plan(0).rows)
        == 8
    )
    with pytest.raises(ConfigError, match="has no option 'begin'"):
        named_balancer("from_rank", {"begin": 1})
    with pytest.raises(PlanError, match="options belong to a balancer named by its name"):
        named_balancer(FromRank(StartOptions()), {"start": 1})
