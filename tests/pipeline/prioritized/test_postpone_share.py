"""How much is postponed: the same answer on every rank, the fastest share in the end, and a state that can be saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from freescale.comm.world.ranks import Ranks
from freescale.errors import CheckpointError
from freescale.pipeline.prioritized.adaptive import Switch
from freescale.pipeline.prioritized.postpone_share import SHARES, PostponeShare
from freescale.pipeline.prioritized.trials import PROBE
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")


def alone(every: int | None) -> PostponeShare:
    return PostponeShare(ranks=Ranks(0, 1, CPU), every=every, hides=lambda step: True)


def test_trials_begin_when_those_of_the_way_are_over() -> None:
    share, way = alone(100), Switch(on=True, ranks=Ranks(0, 1, CPU), every=100)
    tried = [step for step in range(3000) if share.share(step) != 1.0]
    assert tried[: 2 * PROBE] == list(range(100 + 3 * PROBE, 100 + 5 * PROBE))
    assert len(tried) == 2 * PROBE * 5  # at 100, 200, 400, 800 and 1,600
    assert all(way.prioritized(step) for step in tried)
    assert {alone(None).share(step) for step in range(500)} == {1.0}


def test_a_share_is_tried_as_often_as_the_way_in_long_runs_too() -> None:
    share, way = alone(100), Switch(on=True, ranks=Ranks(0, 1, CPU), every=100)
    halves = [step for step in range(30_000) if share.share(step) == 0.5]
    plain = [step for step in range(30_000) if not way.prioritized(step)]
    assert halves == [step + 3 * PROBE for step in plain]
    assert halves[::PROBE][-3:] == [start + 3 * PROBE for start in (12_800, 19_200, 25_600)]


def run_with(rank: int, ms: dict[float, float], hides: bool) -> dict[str, Any]:
    ranks = Ranks(rank, 2, CPU, group=dist.group.WORLD, control=dist.group.WORLD)
    share = PostponeShare(ranks=ranks, every=60, hides=lambda step: hides)
    decided = []
    for step in range(260):
        took = ms[share.share(step)] * (1 + 0.1 * rank) * (5 if step % 7 == rank else 1)
        share.observe(step, took)
        said = share.agree(step)
        decided += [] if said is None else [said]
    return {"decided": decided, "last": share.share(259), "state": share.state()}


@pytest.mark.parametrize(
    ("ms", "ends"),
    [
        ((10.0, 12.0, 14.0), 1.0),
        ((12.0, 10.0, 14.0), 0.5),
        ((12.0, 11.0, 10.0), 0.0),
        ((10.0, 9.95, 9.92), 1.0),
    ],
)
def test_ranks_agree_on_the_fastest_share_unless_it_is_noise(ms: tuple[float, ...], ends: float) -> None:
    first, second = run_on_ranks(run_with, 2, dict(zip(SHARES, ms)), True)
    assert first == second
    assert [each["share"] for each in first["decided"]] == [ends, ends]
    assert first["decided"][0]["changed"] is (ends != 1.0)
    assert first["decided"][0]["ms"]["1"] == pytest.approx(ms[0] * 1.05)
    assert first["last"] == ends


def test_steps_that_hide_nothing_decide_nothing() -> None:
    first, _ = run_on_ranks(run_with, 2, dict(zip(SHARES, (14.0, 12.0, 10.0))), False)
    assert first["decided"] == []
    assert first["last"] == 1.0


def test_the_state_is_taken_over() -> None:
    share = alone(60)
    share.load_state([[0, 1.0], [110, 0.5]])
    assert (share.share(50), share.share(119)) == (1.0, 0.5)
    again = alone(60)
    again.load_state(share.state())
    assert [again.share(step) for step in range(500)] == [share.share(step) for step in range(500)]
    again.load_state([])
    with pytest.raises(CheckpointError, match="what is postponed"):
        share.load_state([["a"]])
