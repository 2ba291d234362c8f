"""Decisions by step, shared with loader processes and kept in checkpoints."""

from __future__ import annotations

import multiprocessing
import pickle
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from freescale.balance.costs.cost_fit import MeasuredStep
from freescale.balance.costs.cost_model import CostModel
from freescale.balance.costs.decisions import Decisions
from freescale.balance.costs.rank_speed import at_equal_speed, measured_speeds, next_speeds, speed_errors
from freescale.balance.sampler import BalancedSampler
from freescale.errors import CheckpointError


def model(per_token: float) -> CostModel:
    return CostModel(fixed_ms=1.0, per_sample_ms=0.5, per_token_ms=per_token, per_square_ms=0.001)


def test_a_decision_holds_from_its_step_on() -> None:
    decisions = Decisions(model(1.0), num_ranks=2)
    decisions.announce(10, model(2.0), [1.0, 0.5])
    decisions.announce(20, model(3.0), [1.0, 1.0])
    per_token = [decisions.at(step)[0].per_token_ms for step in (0, 9, 10, 19, 20, 999)]
    assert per_token == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    speeds = decisions.at(10)[1]
    assert speeds is not None
    assert speeds.tolist() == [1.0, 0.5]
    assert decisions.at(20)[1] is None


def test_many_decisions_keep_the_last_ones() -> None:
    decisions = Decisions(model(0.5), num_ranks=1)
    for number in range(1, 100):
        decisions.announce(10 * number, model(float(number)), [1.0])
    assert [decisions.at(step)[0].per_token_ms for step in (989, 990, 2000)] == [98.0, 99.0, 99.0]


def plan_when_told(decisions: Decisions, go: Any, answer: Any) -> None:
    """In a loader process."""
    answer.put("started")
    go.wait(60)
    answer.put(decisions.at(5)[0].per_token_ms)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_loader_processes_see_new_decisions_however_they_were_started(method: str) -> None:
    decisions = Decisions(model(1.0), num_ranks=2)
    context: Any = multiprocessing.get_context(method)
    go, answer = context.Event(), context.SimpleQueue()
    process = context.Process(target=plan_when_told, args=(decisions, go, answer))
    process.start()
    assert answer.get() == "started"
    decisions.announce(5, model(7.0), [1.0, 1.0])
    go.set()
    assert answer.get() == 7.0
    process.join()


def test_decisions_are_never_copied_unseen() -> None:
    with pytest.raises((RuntimeError, pickle.PicklingError)):
        pickle.dumps(Decisions(model(1.0), num_ranks=2))


def test_state_survives_and_other_ranks_forget_the_speeds() -> None:
    decisions = Decisions(model(1.0), num_ranks=2)
    decisions.announce(10, model(2.0), [1.0, 0.5])
    same, other = Decisions(model(9.0), num_ranks=2), Decisions(model(9.0), num_ranks=3)
    for one in (same, other):
        one.load_state(decisions.state())
    assert astuple(same.at(12)[0]) == astuple(decisions.at(12)[0])
    assert same.latest()[1].tolist() == [1.0, 0.5]
    assert other.at(12)[0].per_token_ms == 2.0
    assert other.at(12)[1] is None
    with pytest.raises(CheckpointError):
        same.load_state([["x"]])  # type: ignore[list-item]


def test_the_sampler_plans_with_the_decision_of_the_step() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 300)
    decisions = Decisions(CostModel.default(), num_ranks=2)
    decisions.announce(3, CostModel.default(), [1.0, 0.5])
    shares = []
    for step in (2, 3):
        tokens = [
            lengths[
                BalancedSampler(lengths, global_batch=60, num_ranks=2, rank=rank, decisions=decisions)
                .plan(step)
                .rows
            ].sum()
            for rank in range(2)
        ]
        shares.append(tokens[1] / sum(tokens))
    assert shares[0] == pytest.approx(0.5, abs=0.02)
    assert shares[1] < 0.47


def steps(speed: float, rng: np.random.Generator) -> list[MeasuredStep]:
    found = []
    for _ in range(40):
        tokens = int(rng.integers(500, 2000))
        ms = float(model(1.0).batches_ms(np.array([[8, tokens, tokens * 50.0]]))[0]) / speed
        pause = 50.0 if rng.random() < 0.1 else 1.0
        found.append(MeasuredStep(num_samples=8, tokens=tokens, squares=tokens * 50.0, ms=ms * pause))
    return found


def test_speeds_are_found_through_pauses() -> None:
    rng = np.random.default_rng(1)
    found = measured_speeds([steps(1.0, rng), steps(0.7, rng), steps(1.0, rng), []], model(1.0))
    np.testing.assert_allclose(found, [1.0, 0.7, 1.0, 1.0], rtol=0.02)


def test_nothing_measured_means_equal() -> None:
    assert measured_speeds([[], []], model(1.0)).tolist() == [1.0, 1.0]


def test_speeds_change_slowly_and_not_for_noise() -> None:
    now = np.array([1.0, 1.0, 1.0])
    assert next_speeds(now, np.array([1.02, 0.3, 0.9])).tolist() == [1.0, 0.65, 0.9]


def test_what_is_noticed_follows_from_the_window() -> None:
    """Ranks 1.5 % apart: known where steps vary by 1 %, left alone where they vary by 20 % or are few."""
    rng = np.random.default_rng(5)

    def window(speed: float, noise: float, count: int = 64) -> list[MeasuredStep]:
        lengths = rng.integers(20, 400, (count, 8))
        ms = [10.0 + 0.01 * float(one.sum()) for one in lengths]
        return [
            MeasuredStep.of(one, ms=each / speed * (1 + noise * rng.standard_normal()))
            for one, each in zip(lengths, ms)
        ]

    known = CostModel(fixed_ms=10.0, per_sample_ms=0.0, per_token_ms=0.01, per_square_ms=0.0)

    def decided(noise: float, count: int = 64) -> list[float]:
        steps = [window(speed, noise, count) for speed in (1.0, 1.0, 1.0, 0.985)]
        errors = speed_errors(steps, known)
        return next_speeds(np.ones(4), measured_speeds(steps, known), errors).tolist()

    assert decided(0.01)[-1] == pytest.approx(0.985, abs=0.006)
    assert decided(0.2) == [1.0] * 4
    assert decided(0.01, count=4) == [1.0] * 4
    assert np.isnan(speed_errors([[]], known)).all()


def test_steps_of_a_slow_rank_count_like_those_of_a_fast_one() -> None:
    slow = at_equal_speed([MeasuredStep(num_samples=1, tokens=5, squares=25.0, ms=10.0)], 0.5)
    assert slow[0].ms == 5.0
