"""A run told to stop saves after the same step on all ranks, and goes on as if it had never stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.errors import Preempted
from freescale.train.loop import train
from freescale.train.stop_request import StopRequest, stop_on_sigterm
from tests.effort import slow
from tests.ranks import run_on_ranks
from tests.small_run import full_tensors, make_run
from tests.train.log.test_reports import late

pytestmark = pytest.mark.timed

RECIPE = (
    "run.steps=16",
    "run.eval_every=6",
    "run.checkpoint_every=50",
    "balance.refit_every=null",
    "pipeline.decide_every=null",
)
LEARNT_IDS = (
    "embedding.id_map=zero_collision",
    "embedding.rows=128",
    "embedding.buckets=8",
    "embedding.max_probe=8",
    "embedding.eviction=lru",
    "head.num_negatives=2",
    "data.global_batch=6",
)


def go(keys: tuple[str, ...], folder: str, *, tell: int | None = None, told: int = 0) -> dict[str, Any]:
    """Train to the end or until stopped; after step `tell`, rank `told` sends itself SIGTERM."""
    run, recorder = make_run((*RECIPE, *keys), folder)
    step = run.train_step.run

    def run_step(ready: Any, schedule: Any) -> Any:
        if ready.plan.step + 1 == tell and run.ranks.rank == told:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(ready, schedule)

    run.train_step.run = run_step  # type: ignore[method-assign]
    stopped = ""
    with stop_on_sigterm(run.stop):
        try:
            train(run, resume_from=run.checkpoints.latest())
        except Preempted as end:
            stopped = str(end)
    return {
        "losses": {event["step"]: event["loss"] for event in recorder.of("step")},
        "evals": [
            {name: value for name, value in event.items() if name != "time"} for event in recorder.of("eval")
        ],
        "stopped": stopped,
        "at": [event["step"] for event in recorder.of("stopped")],
        "tensors": full_tensors(run),
    }


def assert_same_end(whole: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    assert {step: loss for part in parts for step, loss in part["losses"].items()} == whole["losses"]
    assert [event for part in parts for event in part["evals"]] == whole["evals"]
    for name, values in whole["tensors"].items():
        assert np.array_equal(parts[-1]["tensors"][name], values), name


@pytest.mark.parametrize(
    ("tell", "ids", "lag"),
    [
        *[(6, False, 1), (16, False, 0), (4, True, 0)],
        *[slow(tell, False, lag) for tell, lag in ((4, 0), (4, 1), (6, 0), (16, 1))],
        *[slow(tell, True, lag) for tell, lag in ((4, 1), (5, 0), (5, 1))],
    ],
)
def test_one_rank_stops_and_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int, tell: int, ids: bool
) -> None:
    """In the middle, where an evaluation is due, at the end; and where ids have been looked at ahead."""
    late(monkeypatch, lag)
    keys = LEARNT_IDS if ids else ()
    whole = go(keys, f"{tmp_path}/whole")
    first = go(keys, f"{tmp_path}/parts", tell=tell)
    assert f"stopped on request at step {first['at'][0]}, saved " in first["stopped"]
    # A signal that comes between two lines of a step may be heard after it.
    assert tell <= first["at"][0] <= tell + 1 + lag + (2 if ids else 0)
    assert first["stopped"].endswith("; the same command goes on from there")
    assert_same_end(whole, [first, go(keys, f"{tmp_path}/parts")])


def stop_one_of_two(rank: int, keys: tuple[str, ...], folder: str) -> list[dict[str, Any]]:
    whole = go(keys, f"{folder}/whole")
    first = go(keys, f"{folder}/parts", tell=4, told=1)
    return [whole, first, go(keys, f"{folder}/parts")]


@pytest.mark.parametrize("keys", [slow(()), LEARNT_IDS], ids=["", "learnt ids"])
def test_one_rank_that_is_told_is_enough(tmp_path: Path, keys: tuple[str, ...]) -> None:
    ranks = run_on_ranks(stop_one_of_two, 2, (*keys, "pipeline.prioritized=true"), str(tmp_path), timeout=100)
    stops = {tuple(results[1]["at"]) for results in ranks}
    assert len(stops) == 1, "all ranks stop after the same step"
    assert 4 <= stops.pop()[0] <= (7 if keys else 5)
    for whole, *parts in ranks:
        assert_same_end(whole, parts)


def test_an_evaluation_is_given_up_and_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = go((), f"{tmp_path}/whole")
    monkeypatch.setattr(
        "freescale.train.loop.check_weights",
        lambda run, step: os.kill(os.getpid(), signal.SIGTERM) if step == 6 else None,
    )
    first = go((), f"{tmp_path}/parts")
    assert first["at"] == [6]
    assert first["evals"] == []
    monkeypatch.undo()
    assert_same_end(whole, [first, go((), f"{tmp_path}/parts")])


def test_loader_processes_outlast_a_request_to_stop() -> None:
    run, _ = make_run(("data.workers=1", "run.steps=12"))
    others = set(torch.multiprocessing.active_children())
    with run.open_schedule(0) as schedule:
        batches = iter(schedule)
        next(batches)
        (worker,) = set(torch.multiprocessing.active_children()) - others
        os.kill(worker.pid, signal.SIGTERM)
        for ready in batches:
            schedule.update(ready, lr=0.0)
            step = ready.plan.step
    assert step == 11


@pytest.mark.parametrize("way", ["true", "false"])
def test_a_schedule_left_early_leaves_no_loader_process(way: str) -> None:
    run, _ = make_run(("data.workers=1", "run.steps=12", f"pipeline.prioritized={way}"))
    others = set(torch.multiprocessing.active_children())
    with run.open_schedule(0) as schedule:
        next(iter(schedule))
        (worker,) = set(torch.multiprocessing.active_children()) - others
    worker.join(10)
    assert worker.exitcode == 0


PROGRAM = """
import ctypes, time
from freescale.train import stop_request
stop_request._SET_UP_S = stop_request._ONE_REQUEST_S = 0.3
stop = stop_request.StopRequest()
def stand_in_a_library_that_hears_no_signals():
    mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    print("ready", flush=True)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
with stop_request.stop_on_sigterm(stop):
    {body}
"""
STUCK = "stand_in_a_library_that_hears_no_signals()"


def told(body: str, python: str, *, times: int = 1) -> tuple[int, str]:
    """How a program ends that is told so many times to stop, and what it says."""
    process = subprocess.Popen(
        [python, "-c", PROGRAM.format(body=body)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(times):
        time.sleep(0.5)  # a library is entered, and a first request heard
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    return process.returncode, errors


def test_before_the_first_step_a_request_ends_the_run_where_it_is(python: str) -> None:
    code, errors = told("print('ready', flush=True); time.sleep(60)", python)
    assert code == 1, "the exception itself: the command line makes an exit code of it"
    assert "stopped on request before the first step" in errors
    # In a library that hears no signals.
    code, errors = told(STUCK, python)
    assert (code, errors) == (143, "")


def test_a_second_request_ends_the_process_at_once(python: str) -> None:
    assert told(f"stop.wait_for_a_step(); {STUCK}", python, times=2)[0] == 143


def test_signals_are_left_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm(StopRequest()):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
