"""Steps reported one step late, as on a GPU, say what they say at once; nothing is saved after a bad loss."""

from __future__ import annotations

import itertools
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.app.run.train_run import train_run
from freescale.balance import sampler
from freescale.errors import TrainingError
from freescale.kernels.runtime.readback import Readback
from freescale.recipe import load_config
from freescale.train.log.reports import is_one_plan, plan_numbers
from freescale.train.loop import train as train_to_the_end
from tests.effort import slow
from tests.ranks import run_on_ranks
from tests.small_run import SMALL, Recorder, make_run, spoil_loss

TIMES = {"time", "step_ms", "tokens_per_s", "bubble", "straggler", "comm", "host", "seconds", "samples_per_s"}
RECIPE = (*SMALL, "run.steps=11", "run.eval_every=4", "run.checkpoint_every=3", "run.log_every=2")


def late(monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    monkeypatch.setattr("freescale.train.loop.lag_of", lambda ranks: lag)
    # As on a GPU, whose losses are looked at when they are reported.
    monkeypatch.setattr(Readback, "here", property(lambda self: lag == 0))


def train(folder: Path, *keys: str) -> list[dict[str, object]]:
    config = load_config(None, [*RECIPE, f"run.out={folder}", *keys])
    train_run(config, resume="never", open_terminal=lambda total: Recorder())
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def told(event: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in event.items() if name not in TIMES}


@pytest.mark.parametrize(
    "keys",
    [
        slow(()),
        slow(("optim.clip_norm=0.1",)),
        ("optim.clip_norm=0.1", "embedding.id_map=zero_collision"),
        ("ffn.kind=moe", "ffn.hidden=16", "moe.experts=4", "moe.top_k=2", "moe.aux_loss=0.01"),
    ],
)
def test_a_late_report_says_what_one_at_once_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    runs = []
    acts = (
        "ffn.kind=moe" in keys
    )  # balanced routers want to hear of a step before the one after the next begins
    for lag in (0, 1) if acts else (0, 1, 2):
        late(monkeypatch, lag)
        runs.append([told(e) for e in train(tmp_path / str(lag), *keys) if e["event"] == "step"])
    assert [event["step"] for event in runs[0]] == list(range(1, 12))
    assert all(run == runs[0] for run in runs[1:])


def test_late_steps_have_their_own_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch, 1)
    steps = [event for event in train(tmp_path / "run") if event["event"] == "step"]
    assert all(float(str(event["step_ms"])) > 0 and event["tokens_per_s"] for event in steps)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_loss_that_is_no_number_ends_the_run_before_a_checkpoint_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    late(monkeypatch, lag)
    spoil_loss(monkeypatch, at_step=2)
    # A checkpoint is due after each step; the loss is told, not the weights that a late report lets it spoil.
    with pytest.raises(TrainingError, match="the loss is nan at step 2"):
        train(tmp_path, "run.checkpoint_every=1")
    assert not list((tmp_path / "checkpoints").glob("step-00000002*"))


def plan_otherwise(rank: int, at_step: int, folder: str) -> str:
    run, _ = make_run(("run.steps=6",), folder)
    real, calls = sampler.plan_hash, itertools.count(1)

    def odd_on_one_rank(rows: Any, owner: Any) -> str:
        return "odd" if next(calls) == at_step and rank == 1 else real(rows, owner)

    sampler.plan_hash = odd_on_one_rank  # in this process alone
    with pytest.raises(TrainingError) as raised:
        train_to_the_end(run, resume_from=None)
    return str(raised.value)


@pytest.mark.parametrize("at_step", [slow(1), 4])
def test_ranks_that_plan_a_step_otherwise_end_the_run(tmp_path: Path, at_step: int) -> None:
    """Nobody trains other samples than the others believe: the plan's hash travels with the loss."""
    messages = run_on_ranks(plan_otherwise, 2, at_step, str(tmp_path))
    assert len(set(messages)) == 1
    host = platform.node()
    assert f"rank 1 on {host} has planned step {at_step} otherwise than rank 0 on {host}" in messages[0]
    assert "odd on rank 1" in messages[0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 2**64 - 1))
def test_sums_tell_whether_all_ranks_have_one_plan(plans: list[int], first: int) -> None:
    numbers = [plan_numbers(f"{first + plan:x}") for plan in plans]
    values, squares = (float(sum(column)) for column in zip(*numbers))
    assert is_one_plan(values, squares, num_ranks=len(plans)) == (len(set(plans)) == 1)


def test_values_of_a_cpu_are_there_at_once() -> None:
    values = Readback(torch.tensor([1.5, 2.0], dtype=torch.float64))
    assert values.here
    assert values.read().tolist() == [1.5, 2.0]
