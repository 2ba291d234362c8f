"""The order check finds every read or update that comes too early, and a schedule that was broken on purpose."""

from __future__ import annotations

import pytest
import torch

from freescale.errors import TrainingError
from freescale.pipeline.prioritized import pipeline as prioritized
from freescale.pipeline.prioritized.order_check import OrderCheck
from tests.pipeline.prioritized.test_pipeline import specs_of
from tests.pipeline.two_paths import channels_of, make_embedding, random_batches, train_prioritized
from tests.ranks import run_on_ranks


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_a_row_may_be_read_when_earlier_batches_have_updated_it():
    order = OrderCheck()
    order.uses(0, "item", rows(1, 2, 3))
    order.uses(1, "item", rows(2, 5))
    order.read(1, "item", rows(5, 7), stage="fetch NOL rows")
    order.read(0, "item", rows(1, 2), stage="fetch OL rows")
    order.updated(0, "item", rows(2), stage="apply")
    order.read(1, "item", rows(2), stage="fetch OL rows")
    order.updated(0, "item", rows(1, 3), stage="apply")
    order.updated(1, "item", rows(2, 5), stage="apply")
    assert order.waiting() == {}


def test_a_read_before_the_update_names_stage_step_row_and_table():
    order = OrderCheck()
    order.uses(6, "item", rows(1, 4))
    order.read(7, "user", rows(4), stage="fetch NOL rows")
    with pytest.raises(TrainingError) as caught:
        order.read(7, "item", rows(3, 4), stage="fetch NOL rows")
    assert "stage 'fetch NOL rows' of step 8 reads row 4 of table 'item' before its update of step 7" in str(
        caught.value
    )


def test_updates_come_once_and_in_the_order_of_the_batches():
    order = OrderCheck()
    order.uses(0, "item", rows(1))
    order.uses(1, "item", rows(1, 2))
    with pytest.raises(TrainingError, match="updates row 1 of table 'item' before its update of step 1"):
        order.updated(1, "item", rows(1, 2), stage="apply")
    order.updated(0, "item", rows(1), stage="apply")
    with pytest.raises(TrainingError, match="again, or without need"):
        order.updated(0, "item", rows(1), stage="apply")


def broken(rank: int, how: str) -> str:
    """Break one rule of the schedule, then train."""
    specs = specs_of("sgd")
    if how == "too far ahead":
        # NOL rows of n + 2 before the parked gradients of n are applied.
        start = prioritized.PrioritizedPipeline._start_bulk

        def eager(self):
            self._last_updated += 1
            start(self)
            self._last_updated -= 1

        prioritized.PrioritizedPipeline._start_bulk = eager
    if how == "late rows early":
        fetch = prioritized.RowMoves.fetch_early

        def everything(self, flight):
            for table in flight.tables.values():
                table.early, table.late = table.request.whole(), None
            return fetch(self, flight)

        prioritized.RowMoves.fetch_early = everything
    if how != "not at all":
        # What is fetched ahead is there before the model computes, however slow the communication thread is.
        begin = prioritized.PrioritizedPipeline._start_bulk

        def at_once(self):
            begin(self)
            for flight in self._flights:
                if flight.early is not None:
                    flight.early.wait()

        prioritized.PrioritizedPipeline._start_bulk = at_once
    batches = random_batches(3, specs, 30, rank, 2)
    train_prioritized(make_embedding(specs), batches, channels=channels_of(sockets=False), check=True)
    return "nothing found"


@pytest.mark.parametrize("how", ["too far ahead", "late rows early"])
def test_a_broken_schedule_is_found(how):
    with pytest.raises(AssertionError, match=r"reads row .* before its update of step"):
        run_on_ranks(broken, 2, how)


def test_the_schedule_as_it_is_passes():
    assert run_on_ranks(broken, 2, "not at all") == ["nothing found"] * 2
