"""Weights that have blown up are named and end a run on all ranks, before anything of them is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from freescale.errors import TrainingError
from freescale.train.loop import train
from freescale.train.run import Run
from freescale.train.state.weight_check import LARGEST_MOMENT, LARGEST_WEIGHT, blown_up, check_weights
from tests.ranks import run_on_ranks
from tests.small_run import make_run

RECIPE = ("run.steps=4", "run.eval_every=4", "run.checkpoint_every=2")


def first_weight(run: Run) -> torch.Tensor:
    return next(run.state.model.parameters()).data


def moment(run: Run, part: str) -> torch.Tensor:
    return run.state.optimizer.state[next(run.state.model.parameters())][part]


def table(run: Run, part: str) -> torch.Tensor:
    held = run.state.embedding.tables["item"]
    return held.weight if part == "weight" else held.state[part]


PLANTED: list[tuple[Callable[[Run], torch.Tensor], float, str]] = [
    (first_weight, 1e30, "model."),
    (first_weight, float("nan"), "model."),
    (first_weight, -float("inf"), "model."),
    (lambda run: moment(run, "exp_avg_sq"), float("inf"), "optimizer."),
    (lambda run: moment(run, "exp_avg"), float("nan"), "optimizer."),
    (lambda run: table(run, "weight"), -1e30, "table.item.weight"),
    (lambda run: table(run, "moment2"), float("nan"), "table.item.moment2"),
]


def spoil_after(run: Run, step: int, spoil: Callable[[], None]) -> None:
    """Once this step (from 1) has been taken."""
    take = run.train_step.run

    def taken(ready: Any, schedule: Any) -> Any:
        result = take(ready, schedule)
        if ready.plan.step + 1 == step:
            spoil()
        return result

    run.train_step.run = taken  # type: ignore[method-assign]


@pytest.mark.parametrize(("where", "value", "name"), PLANTED)
def test_a_run_ends_before_it_saves_what_has_blown_up(
    where: Callable[[Run], torch.Tensor], value: float, name: str, tmp_path: Path
) -> None:
    run, recorder = make_run((*RECIPE, "embedding.optimizer=adam"), tmp_path)
    spoil_after(run, 4, lambda: where(run).view(-1)[-1:].fill_(value))
    with pytest.raises(TrainingError, match=f"weights have blown up after step 4: {name}") as caught:
        train(run, resume_from=None)
    assert ("embedding.lr" if name.startswith("table.") else "optim.lr") in str(caught.value)
    assert run.checkpoints.wait() is None or run.checkpoints.latest().name == "step-00000002"
    assert not list((tmp_path / "checkpoints").glob("step-00000004*"))
    assert recorder.of("eval") == []


def test_a_healthy_run_passes_and_squares_may_be_larger(tmp_path: Path) -> None:
    run, _ = make_run((*RECIPE, "embedding.optimizer=adam"), tmp_path)
    train(run, resume_from=None)
    check_weights(run, 4)
    for fill in (moment(run, "exp_avg_sq"), table(run, "moment2")):
        fill.fill_(100 * LARGEST_WEIGHT)
    first_weight(run).fill_(LARGEST_WEIGHT / 2)
    check_weights(run, 4)


def spoil_one_rank(rank: int, folder: str) -> str:
    recipe = (*RECIPE, "embedding.replicate_below_mb=0")
    run, _ = make_run(recipe, folder)
    if rank == 1:  # a row of its own: no other rank has it
        spoil_after(run, 2, lambda: table(run, "weight")[-1].fill_(1e30))
    try:
        train(run, resume_from=None)
    except TrainingError as error:
        return str(error)
    return "went on"


def test_all_ranks_stop_together_with_the_same_words(tmp_path: Path) -> None:
    told = run_on_ranks(spoil_one_rank, 2, str(tmp_path), timeout=110)
    assert "weights have blown up after step 2: table.item.weight" in told[0]
    assert "1e+30 on rank 1" in told[0]
    assert told[0] == told[1]
    assert not list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_only_the_bad_ones_are_named(dtype: torch.dtype) -> None:
    tensors = {
        "fine": torch.randn(5, 3, dtype=dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
        "one number": torch.tensor(7.0),
        "large": torch.tensor([1.0, -3e18], dtype=dtype),
        "none": torch.tensor([float("nan"), 1.0], dtype=dtype),
    }
    found = blown_up(tensors, limit=LARGEST_WEIGHT)
    assert list(found) == ["large", "none"]
    assert found["large"] == pytest.approx(3e18, rel=0.01)
    assert list(blown_up(tensors, limit=LARGEST_MOMENT)) == ["none"]
    assert blown_up({}, limit=1.0) == blown_up({"empty": torch.zeros(0)}, limit=1.0) == {}
