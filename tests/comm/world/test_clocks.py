"""One time for all ranks: who shares a clock, what is measured between those who do not, and how exact it is."""

from __future__ import annotations

import time

import pytest
import torch

from freescale.comm.world.clocks import SharedClock
from freescale.comm.world.ranks import Ranks
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks

pytestmark = pytest.mark.timed


class OtherClock:
    """The monotonic clock of another machine; each look at it may take a while."""

    def __init__(self, shift: float) -> None:
        self.shift, self.pause = shift, 0.0

    def __call__(self) -> float:
        time.sleep(self.pause)
        return time.monotonic() + self.shift


def of_a_clone(rank: int) -> tuple[int, float, float]:
    """Ranks 1 and 2 are on a copy of the machine of rank 0: all say the same name."""
    shared = SharedClock(these_ranks(), clock=OtherClock(5.0 if rank else 0.0), machine="the same")
    return shared.num_machines, shared.offset, shared.error


def test_a_copy_of_a_running_machine_does_not_pass_for_the_same_clock():
    first, *copies = run_on_ranks(of_a_clone, 3)
    assert first[:2] == (3, 0.0)
    for _, offset, error in copies:
        assert offset == pytest.approx(-5.0, abs=max(1e-3, error))
        assert 0 < error < 0.05


def of_one_machine(rank: int) -> tuple[int, float, float, float]:
    shared = SharedClock(these_ranks())
    return shared.num_machines, shared.offset, shared.error, shared.largest_error


def test_ranks_of_one_machine_share_its_clock():
    assert run_on_ranks(of_one_machine, 3) == [(1, 0.0, 0.0, 0.0)] * 3


def measured_again(rank: int) -> list[tuple[float, float, float]]:
    """The second time the network is slow one way: half of a round trip tells little."""
    clock = OtherClock(5.0 if rank else 0.0)
    shared = SharedClock(these_ranks(), clock=clock, machine=f"machine {rank}")
    told = [(shared.offset, shared.error, shared.largest_error)]
    clock.pause = 0.05 if rank else 0.0
    shared.measure(rounds=2)
    return [*told, (shared.offset, shared.error, shared.largest_error)]


def test_a_good_offset_is_not_replaced_by_a_worse_one():
    first, second = run_on_ranks(measured_again, 2)
    assert second[1][0] == second[0][0]
    assert second[0][1] <= second[1][1] < 0.02  # by now it may have drifted a little
    assert [error for *_, error in first] == [error for _, error, _ in second]


@pytest.mark.parametrize(("age", "kept"), [(10.0, True), (1000.0, False)])
def test_with_age_an_offset_gives_way(age, kept, monkeypatch):
    from freescale.comm.world.clocks import _Offset

    shared = SharedClock(Ranks(rank=0, num_ranks=1, device=torch.device("cpu")))
    shared._better(1, _Offset(-5.0, 0.0001, 100.0))
    offset, error = shared._better(1, _Offset(-5.01, 0.02, 100.0 + age))
    assert offset == (-5.0 if kept else -5.01)
    assert error == pytest.approx(0.0011 if kept else 0.02)
