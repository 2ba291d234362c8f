"""Steps reported one step late, as on a GPU, say what they say at once; nothing is saved after a bad loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from freescale.app.commands import train_run
from freescale.errors import TrainingError
from freescale.kernels.runtime.readback import Readback
from freescale.recipe import load_config
from tests.small_run import SMALL, Recorder, spoil_loss

TIMES = {"time", "step_ms", "tokens_per_s", "bubble", "straggler", "comm", "host", "seconds", "samples_per_s"}
RECIPE = (*SMALL, "run.steps=11", "run.eval_every=4", "run.checkpoint_every=3", "run.log_every=2")


def late(monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    monkeypatch.setattr("freescale.train.loop.lag_of", lambda ranks, extensions: lag)
    # As on a GPU, whose losses are looked at when they are reported.
    monkeypatch.setattr(Readback, "here", property(lambda self: lag == 0))


def train(folder: Path, *keys: str) -> list[dict[str, object]]:
    config = load_config(None, [*RECIPE, f"run.out={folder}", *keys])
    train_run(config, resume="never", open_terminal=lambda total: Recorder())
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def told(event: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in event.items() if name not in TIMES}


@pytest.mark.parametrize("keys", [(), ("optim.clip_norm=0.1",), ("embedding.id_map=zero_collision",)])
def test_a_late_report_says_what_one_at_once_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    runs = []
    for lag in (0, 1, 2):
        late(monkeypatch, lag)
        runs.append([told(e) for e in train(tmp_path / str(lag), *keys) if e["event"] == "step"])
    assert [event["step"] for event in runs[0]] == list(range(1, 12))
    assert runs[1] == runs[0]
    assert runs[2] == runs[0]


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


def test_values_of_a_cpu_are_there_at_once() -> None:
    values = Readback(torch.tensor([1.5, 2.0], dtype=torch.float64))
    assert values.here
    assert values.read().tolist() == [1.5, 2.0]
