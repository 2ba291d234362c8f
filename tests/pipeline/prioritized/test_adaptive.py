"""The switch: the same answer on every rank, the faster way in the end, and a state that can be saved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from freescale.comm.world.ranks import Ranks
from freescale.errors import CheckpointError
from freescale.pipeline.prioritized.adaptive import Switch
from freescale.pipeline.prioritized.trials import PROBE
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")


def alone(**options) -> Switch:
    return Switch(ranks=Ranks(0, 1, CPU), **options)


@given(st.integers(0, 100_000), st.booleans())
def test_without_trials_the_way_is_fixed(step, on):
    switch = alone(on=on, every=None)
    assert switch.prioritized(step) is on
    assert switch.agree(step) is None


def test_trials_come_at_doubling_distances_and_are_short():
    switch = alone(on=True, every=100)
    tried = [step for step in range(20_000) if not switch.prioritized(step)]
    starts = [step for step in tried if step - 1 not in tried]
    assert starts == [100, 200, 400, 800, 1600, 3200, 6400, 12800, 19200]
    assert len(tried) == PROBE * len(starts)


def test_a_trial_needs_room_before_it():
    assert alone(on=True, every=1).prioritized(2 * PROBE)


def run_with(rank: int, prioritized_ms: float, plain_ms: float) -> dict:
    ranks = Ranks(rank, 2, CPU, group=dist.group.WORLD, control=dist.group.WORLD)
    switch = Switch(on=True, ranks=ranks, every=40)
    decided, ways = [], []
    for step in range(400):
        way = switch.prioritized(step)
        ways.append(way)
        # Ranks measure different times, and now and then a step takes long for no reason.
        ms = (prioritized_ms if way else plain_ms) * (1 + 0.1 * rank) * (5 if step % 7 == rank else 1)
        # The loader asks two steps ahead, before this step's agreement.
        ahead = [switch.prioritized(step + n) for n in (1, 2)]
        switch.observe(step, ms)
        said = switch.agree(step)
        if said is not None:
            decided.append(said)
        assert [switch.prioritized(step + n) for n in (1, 2)] == ahead, "a batch under way changed its way"
    return {"decided": decided, "ways": ways, "state": switch.state()}


@pytest.mark.parametrize(("ms", "ends"), [((10.0, 14.0), True), ((14.0, 10.0), False), ((10.0, 9.9), True)])
def test_ranks_agree_on_the_faster_way_unless_it_is_noise(ms, ends):
    first, second = run_on_ranks(run_with, 2, *ms)
    assert first == second
    assert [each["prioritized"] for each in first["decided"]] == [ends] * 4
    assert sum(each["changed"] for each in first["decided"]) == (0 if ends else 1)
    assert first["decided"][0]["prioritized_ms"] == pytest.approx(ms[0] * 1.05)
    assert first["decided"][0]["plain_ms"] == pytest.approx(ms[1] * 1.05)
    assert first["ways"][399] is ends


def test_the_state_is_taken_over():
    switch = alone(on=True, every=40)
    switch.load_state([[0, 1], [63, 0]])
    assert switch.prioritized(62)
    assert not switch.prioritized(63)
    again = alone(on=True, every=40)
    again.load_state(switch.state())
    assert [again.prioritized(s) for s in range(500)] == [switch.prioritized(s) for s in range(500)]


def test_a_checkpoint_without_decisions_leaves_the_recipes_way():
    switch = alone(on=True, every=None)
    switch.load_state([])
    assert switch.prioritized(5)
    with pytest.raises(CheckpointError, match="pipeline decisions"):
        switch.load_state([["a"]])
