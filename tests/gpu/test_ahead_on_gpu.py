"""Batches made ready by a thread on one GPU: the bits of the path in turn, with copies and maps on another stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from freescale.comm.world.ranks import Ranks
from freescale.pipeline.schedule import PlainSchedule
from freescale.recipe import build_run, build_source, load_config
from freescale.trace.stages import record_into
from freescale.train.log.events import Progress
from freescale.train.loop import reports_of, timed_batches
from tests.gpu.test_on_gpu import train_on
from tests.pipeline.loading.test_ahead import learn, make_batch, make_map, threads_ahead
from tests.small_run import SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RECIPES = Path(__file__).parents[2] / "recipes"
NUM_STEPS, NUM_IDS, WINDOW = 40, 100_000, 6_000


@pytest.mark.parametrize("flushes", [False, True], ids=["free", "as far ahead as it may be"])
@pytest.mark.parametrize("kind", ["direct", "hash", "none", "lru", "ttl"])
def test_rows_losses_and_saved_state_are_those_of_the_path_in_turn(kind: str, flushes: bool) -> None:
    draws = np.random.default_rng(7)
    lengths = [list(draws.integers(0, 40, 200)) for _ in range(NUM_STEPS)]
    loaded = [
        make_batch(step, each, draws, window=WINDOW, num_ids=NUM_IDS) for step, each in enumerate(lengths)
    ]
    batches = [planned._replace(batch=planned.batch.pin()) for planned in loaded]
    matrix = torch.randn(2048, 2048, device="cuda")

    def busy(schedule: PlainSchedule) -> None:
        """Keeps the stream that computes behind the host, so that a missing wait would show."""
        if flushes:
            schedule.flush()
        for _ in range(20):
            matrix.copy_((matrix @ matrix).clamp(-1, 1))

    in_turn, ours = (
        learn(
            batches,
            # As many slots as a few windows have ids: rows change their owners all the time.
            *make_map(kind, guard=2, slots=12_000, num_ids=NUM_IDS, dim=64, device="cuda"),
            stops={5, 6, 20},
            ahead=way,
            between=busy,
        )
        for way in (False, True)
    )
    torch.cuda.synchronize()
    assert len(in_turn) == len(ours) > 2 * NUM_STEPS
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(in_turn, ours))
    assert threads_ahead() == []


@pytest.mark.parametrize("id_map", ["direct", "zero_collision"])
def test_a_run_ahead_follows_the_run_in_turn(id_map: str, tmp_path: Path) -> None:
    recipe = (f"embedding.id_map={id_map}", "run.steps=40", "run.eval_every=15", "run.checkpoint_every=11")
    in_turn, ours = (
        train_on("cuda", tmp_path / way, *recipe, f"pipeline.ahead={way}") for way in ("false", "true")
    )
    assert ours["losses"] == pytest.approx(in_turn["losses"], rel=1e-4)
    if id_map == "zero_collision":
        np.testing.assert_array_equal(ours["tensors"]["ids.identity"], in_turn["tensors"]["ids.identity"])
    assert threads_ahead() == []


@pytest.mark.parametrize("recipe", [None, RECIPES / "mlperf_dlrmv4_small.yaml"], ids=["items", "requests"])
def test_neither_thread_waits_for_the_gpu_in_a_step(recipe: Path | None, tmp_path: Path) -> None:
    """With ids that become rows by a formula; a map that learns is waited for by the thread alone."""
    keys = ("run.device=cuda", "run.steps=16", "run.capture=off", "run.eval_every=null")
    config = load_config(recipe, [*(SMALL if recipe is None else ()), *keys, f"run.out={tmp_path}"])
    ranks = Ranks(rank=0, num_ranks=1, device=torch.device("cuda"))
    run = build_run(config, build_source(config), ranks, Progress())
    reports = reports_of(run)
    with run.open_schedule(0) as schedule:
        run.accounts.begin(1)
        try:
            for ready in timed_batches(schedule, 0):
                assert threads_ahead(), "on a GPU it is on by itself"
                torch.cuda.set_sync_debug_mode("error" if 5 <= ready.plan.step < 12 else "default")
                result = run.train_step.run(ready, schedule)
                reports.add(ready, result, seconds=run.accounts.end_step())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reports.flush()
    run.accounts.close()  # in the middle of a watch
    record_into(None)
