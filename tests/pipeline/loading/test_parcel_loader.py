"""Parcels written by loader processes are those the rank would have written, in order, and errors come through."""

from __future__ import annotations

import gc
import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from freescale.comm.world.ranks import Ranks
from freescale.errors import DataError, TrainingError
from freescale.pipeline import LOOK_AHEAD, Padder, ParcelLoader, ParcelMaker
from freescale.recipe import assembly, build_run, build_source, load_config
from freescale.recipe.balance import build_rebalancer, first_decisions
from freescale.recipe.building.loading import loader_processes
from freescale.train.log.events import Progress
from freescale.train.loop import take_steps
from freescale.train.state.run_state import run_tensors
from tests.padded_runs import padded_capture
from tests.small_run import SMALL, Recorder

pytestmark = pytest.mark.timed

CPU = torch.device("cpu")
KEYS = (*SMALL, "run.steps=12", "run.eval_every=0", "synthetic.sigma=0.4")
made: list[ParcelMaker] = []


@pytest.fixture
def padded_runs(monkeypatch):
    """Runs on a CPU that pad batches, as runs on a GPU do."""
    monkeypatch.setattr(assembly, "build_capture", padded_capture)


def small_run(tmp_path, *keys):
    config = load_config(None, [*KEYS, *keys, f"run.out={tmp_path}"])
    ranks = Ranks(rank=0, num_ranks=1, device=CPU)
    return build_run(config, build_source(config), ranks, Progress([Recorder()]))


def maker_of(tmp_path, monkeypatch, *keys):
    """What makes the steps of a small run."""
    monkeypatch.setattr(ParcelLoader, "__init__", lambda self, maker, **options: made.append(maker))
    monkeypatch.setattr(ParcelLoader, "close", lambda self: None)
    run = small_run(tmp_path, "data.workers=1", *keys)
    with run.open_schedule(0):
        pass
    monkeypatch.undo()
    return made.pop()


@pytest.mark.parametrize("keys", [("pipeline.ahead=false",), ("pipeline.ahead=true",)])
def test_a_run_is_that_of_batches_loaded_in_the_rank(tmp_path, padded_runs, keys):
    states = []
    for workers in (0, 2):
        run = small_run(tmp_path / str(workers), f"data.workers={workers}", *keys)
        with run.open_schedule(0) as schedule:
            take_steps(run, schedule)
        states.append(run_tensors(run))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    "keys", [(), ("synthetic.features=true", "tables.genre.dim=5")], ids=["items", "features"]
)
def test_parcels_of_replayed_sizes_have_the_bytes_the_rank_would_send(
    tmp_path, padded_runs, monkeypatch, keys
):
    maker = maker_of(tmp_path, monkeypatch, *keys)
    padder = maker.padder
    for wishes in (padder._wishes, padder._longer_wishes):
        wishes.note("device_offsets")
        wishes.note("tiles", "queries", 64, 32, None)
    loader = ParcelLoader(maker, first_step=3, num_steps=12, workers=2)
    written = []
    monkeypatch.setattr(
        padder, "written", lambda *a, **k: written.append(1) or Padder.written(padder, *a, **k)
    )
    try:
        for step in range(3, 15):
            parcel = loader.next()
            assert parcel is not None
            plan, batch, source = maker.make(step)
            wanted = Padder.send(padder, source)
            ours = parcel.padded
            assert parcel.plan.plan_hash == plan.plan_hash
            assert torch.equal(parcel.batch.offsets, batch.offsets)
            assert torch.equal(parcel.batch.samples["row"], batch.samples["row"])
            assert (ours.key, ours.num_bytes, ours.num_rows) == (
                wanted.key,
                wanted.num_bytes,
                wanted.num_rows,
            )
            assert ours.unique.keys() == ours.num_rows.keys() == maker.finder.tables.keys()
            assert all(torch.equal(rows, wanted.unique[name]) for name, rows in ours.unique.items())
            same = ours.memory[0][: ours.num_bytes] == wanted.memory[0][: ours.num_bytes]
            assert same.float().mean() > 0.99, "but for the bytes between two tables"
            padder._replayed.add(wanted.key)
        assert loader.next() is None
    finally:
        loader.close()
    assert len(written) >= 3


def test_an_error_of_the_data_comes_through(tmp_path, padded_runs, monkeypatch):
    maker = maker_of(tmp_path, monkeypatch)
    monkeypatch.setattr(type(maker.finder.id_map), "rows", refuse)
    loader = ParcelLoader(maker, first_step=0, num_steps=2, workers=1)
    with pytest.raises(DataError, match="no such id"):
        loader.next()
    loader.close()


def refuse(self, ids, *, step=None):
    raise DataError("no such id")


def test_a_process_that_was_killed_is_told(tmp_path, padded_runs, monkeypatch):
    loader = ParcelLoader(maker_of(tmp_path, monkeypatch), first_step=0, num_steps=50, workers=1)
    assert loader.next() is not None
    os.kill(loader._workers[0]._process.pid, signal.SIGKILL)
    with pytest.raises(TrainingError, match="a process that loads batches has ended"):
        list(iter(loader.next, None))
    loader.close()


def test_a_process_that_is_done_waits_until_all_is_taken(tmp_path, padded_runs, monkeypatch):
    loader = ParcelLoader(maker_of(tmp_path, monkeypatch), first_step=0, num_steps=3, workers=1)
    assert loader.next() is not None
    assert loader.next() is not None
    for _ in range(3):
        loader._workers[0].free(0, {})
    time.sleep(0.3)
    assert loader.next() is not None
    assert loader.next() is None
    loader.close()


def test_what_the_rank_left_for_the_collector_is_not_touched_by_its_processes(
    tmp_path, padded_runs, monkeypatch
):
    class Foreign:
        """Memory of a GPU, say."""

        def __del__(self) -> None:
            if os.getpid() != rank:
                os._exit(7)

    rank = os.getpid()
    maker = maker_of(tmp_path, monkeypatch)
    gc.disable()
    try:
        left = Foreign()
        left.itself = left
        del left
        loader = ParcelLoader(
            replace(maker, examples=Collecting(maker.examples)), first_step=0, num_steps=2, workers=1
        )
        assert loader.next() is not None
        loader.close()
    finally:
        gc.enable()
        gc.collect()


class Collecting:
    """Examples that are read with a full collection."""

    def __init__(self, examples):
        self._examples = examples

    def batch(self, rows, *, step):
        gc.collect()
        return self._examples.batch(rows, step=step)


@pytest.mark.parametrize(
    ("cores", "kind", "here", "most"),
    [
        (16, {"replayed": True}, 4, 4),
        (16, {"replayed": True, "features": True}, 8, 8),
        (16, {"replayed": True, "features": True, "on_gpu": True, "several": True, "sharing": 4}, 2, 3),
        (16, {"replayed": True, "on_gpu": True, "several": True, "sharing": 4}, 1, 1),
        (16, {"replayed": True, "on_gpu": True, "several": True, "sharing": 8}, 0, 1),
        (16, {"replayed": True, "features": True, "sharing": 4}, 2, 8),
        (2, {"replayed": True}, 0, 4),
        (16, {"replayed": False}, 0, 0),
        (16, {"replayed": False, "features": True, "several": True}, 0, 0),
        (16, {"replayed": False, "on_gpu": True}, 0, 0),
        (16, {"replayed": False, "on_gpu": True, "several": True, "sharing": 4}, 1, 1),
        (16, {"replayed": False, "on_gpu": True, "several": True, "sharing": 8}, 0, 1),
        (16, {"replayed": False, "on_gpu": True, "features": True}, 3, 3),
    ],
    ids=str,
)
def test_processes_come_by_themselves_where_steps_would_wait_for_them(monkeypatch, cores, kind, here, most):
    """Cores decide how many there are, but not what ranks agree on: machines may differ."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    found = loader_processes(load_config(None, []), **kind)
    assert (found.here, found.most) == (here, most)
    asked = loader_processes(load_config(None, ["data.workers=3"]), **kind)
    assert (asked.here, asked.most) == (3, 3)


@pytest.mark.parametrize("most", [0, 1, 8])
def test_costs_are_agreed_on_for_steps_that_no_process_has_planned(most):
    config = load_config(None, [])
    alone = Ranks(rank=0, num_ranks=1, device=torch.device("cpu"))
    rebalancer = build_rebalancer(config, alone, first_decisions(config, alone), most_workers=most)
    assert rebalancer.lookahead >= 2 * most + LOOK_AHEAD + 1
