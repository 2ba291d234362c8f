"""A slow rank is found in the run and gets less work, and the curve does not notice."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.train.loop import train
from tests.ranks import run_on_ranks
from tests.small_run import make_run, train_small

pytestmark = pytest.mark.timed

RECIPE = ("model.dtype=float64", "run.steps=60", "run.eval_every=60", "data.global_batch=48")


def train_with_a_slow_rank(rank: int, folder: str) -> dict[str, Any]:
    run, recorder = make_run((*RECIPE, "balance.refit_every=15"), folder)
    if rank == 1:
        inner = run.state.model.encode

        def slowed(rows: Any, batch: SequenceBatch, *others: Any) -> Any:
            time.sleep(0.0004 * batch.num_tokens if run.state.model.training else 0)
            return inner(rows, batch, *others)

        run.state.model.encode = slowed  # type: ignore[method-assign]
    train(run, resume_from=None)
    return {
        "losses": [event["loss"] for event in recorder.of("step")],
        "decisions": recorder.of("balance"),
        "state": run.rebalancer.decisions.state(),
    }


def test_a_slow_rank_gets_less_work_on_the_same_curve(tmp_path: Any) -> None:
    results = run_on_ranks(train_with_a_slow_rank, 2, str(tmp_path), timeout=100)
    assert results[0]["state"] == results[1]["state"], "ranks must plan with the same bits"
    decided = results[0]["decisions"]
    assert [event["step"] for event in decided] == [18, 33, 48]  # three moves after each was begun
    slow = decided[-1]["speeds"]
    assert slow[1] < 0.8 * slow[0]
    alone = train_small(RECIPE)
    np.testing.assert_allclose(results[0]["losses"], alone["losses"], rtol=1e-9)
