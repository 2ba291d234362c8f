"""StepExtension: one from outside counts, reports, is saved and restored; names that would hide others are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from freescale.errors import ConfigError, TrainingError
from freescale.train import StepExtension
from freescale.train.log import reports
from freescale.train.loop import train
from freescale.train.run import Run
from freescale.train.state.checkpoint import Checkpoints
from freescale.train.state.run_state import run_tensors
from tests.ranks import run_on_ranks
from tests.small_run import Recorder, make_run, spoil_loss

RECIPE = ("run.steps=6", "run.eval_every=3", "run.keep=9")


class Parity:
    """Counts tokens of even and of odd items; keeps the totals in checkpoints."""

    acts = False

    def __init__(self, name: str = "parity", field: str = "odd_tokens") -> None:
        self.name = name
        self.totals = torch.zeros(2, dtype=torch.int64)
        self.was_restored = False
        self._field = field
        self._here = torch.zeros(2, dtype=torch.int64)

    def begin(self, ready: Any) -> None:
        batch = ready.batch if ready.loaded is None else ready.loaded
        self._here = torch.bincount(batch.tokens["item"] % 2, minlength=2)

    def counts(self, step: int) -> Tensor:
        return self._here

    def check(self, counts: Tensor) -> None:
        raise TrainingError(f"parity saw {int(counts.sum())} tokens")

    def fields(self, summed: Tensor, plan: Any) -> Mapping[str, object]:
        assert summed.dtype == torch.float64
        self.totals += summed.long()
        return {self._field: int(summed[1]), "tokens_by_parity": int(summed.sum())}

    def picture(self) -> Mapping[str, object] | None:
        return {"even": int(self.totals[0]), "odd": int(self.totals[1])}

    def state_dict(self) -> dict[str, Tensor]:
        return {"totals": self.totals}

    def restored(self) -> None:
        self.was_restored = True


def extended(run: Run, *more: StepExtension) -> Run:
    """As somebody does who builds a run of his own: the same objects for the step and the state."""
    run.state.extensions = run.train_step.extensions = (*run.state.extensions, *more)
    return run


def train_extended(rank: int, folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    run, recorder = make_run(RECIPE, folder)
    train(extended(run, Parity()), resume_from=None)
    return recorder.of("step"), recorder.of("parity")


def odd_by_step(recorded: list[dict[str, Any]]) -> list[int]:
    return [event["odd_tokens"] for event in recorded]


def test_one_from_outside_counts_over_all_ranks(tmp_path: Path) -> None:
    results = run_on_ranks(train_extended, 2, str(tmp_path / "two"), timeout=110)
    steps, pictures = train_extended(0, str(tmp_path / "one"))
    plain = make_recorded(tmp_path / "plain")
    for there, seen in results:
        assert odd_by_step(there) == odd_by_step(steps)
        assert seen[-1]["odd"] == pictures[-1]["odd"]
    assert len(set(odd_by_step(steps))) > 1
    assert [event["step"] for event in pictures] == [3, 6]
    assert pictures[-1]["odd"] == sum(odd_by_step(steps))
    assert pictures[-1]["even"] + pictures[-1]["odd"] == sum(event["tokens_by_parity"] for event in steps)
    assert [event["loss"] for event in steps] == [event["loss"] for event in plain.of("step")]


def make_recorded(folder: Path) -> Recorder:
    run, recorder = make_run(RECIPE, folder)
    train(run, resume_from=None)
    return recorder


def test_its_tensors_are_saved_and_brought_back(tmp_path: Path) -> None:
    run, recorder = make_run((*RECIPE, "run.patience=1"), tmp_path)
    extended(run, Parity())
    assert "parity.totals" in run_tensors(run)
    train(run, resume_from=None)
    path = Checkpoints(tmp_path / "checkpoints", ranks=run.ranks).folder / "step-00000003"
    again, later = make_run(RECIPE, tmp_path)
    parity = Parity()
    train(extended(again, parity), resume_from=path)
    assert parity.was_restored
    assert later.of("parity")[-1]["odd"] == recorder.of("parity")[0]["odd"] + sum(
        odd_by_step(later.of("step"))
    )


def test_it_may_tell_why_a_loss_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_loss(monkeypatch, at_step=2)
    run, _ = make_run(RECIPE, tmp_path)
    with pytest.raises(TrainingError, match=r"parity saw \d+ tokens"):
        train(extended(run, Parity()), resume_from=None)


@pytest.mark.parametrize("field", ["loss", "tokens", "step_ms", "grad_norm"])
def test_a_field_that_is_there_already_is_refused(field: str, tmp_path: Path) -> None:
    run, _ = make_run(RECIPE, tmp_path)
    with pytest.raises(ConfigError, match=rf"has '{field}' already[\s\S]*parity_{field}"):
        train(extended(run, Parity(field=field)), resume_from=None)


@pytest.mark.parametrize("name", ["ids", "step", "table", "no name"])
def test_a_name_that_hides_another_is_refused(name: str, tmp_path: Path) -> None:
    run, _ = make_run(RECIPE, tmp_path)
    with pytest.raises(ConfigError, match=f"cannot be called '{name}'"):
        dataclasses.replace(run.state, extensions=(*run.state.extensions, Parity(name)))


def test_a_step_without_the_extensions_of_its_run_is_refused(tmp_path: Path) -> None:
    run, _ = make_run(RECIPE, tmp_path)
    state = dataclasses.replace(run.state, extensions=(*run.state.extensions, Parity()))
    with pytest.raises(ConfigError, match="state: ids, experts, parity; train_step: ids, experts"):
        dataclasses.replace(run, state=state)


def test_who_acts_is_told_before_the_step_after_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's steps are reported one behind; beside the next one, between machines, that would be two."""
    monkeypatch.setattr(reports, "on_one_machine", lambda: False)
    cpu, gpu = (SimpleNamespace(device=torch.device(kind), num_ranks=2) for kind in ("cpu", "cuda"))
    acting = Parity()
    acting.acts = True  # type: ignore[misc]
    beside = [reports.is_beside(ranks, [Parity(), one]) for ranks in (cpu, gpu) for one in (Parity(), acting)]  # type: ignore[arg-type]
    assert beside == [True, True, True, False]
    assert (reports.lag_of(cpu), reports.lag_of(gpu)) == (0, 1)  # type: ignore[arg-type]
