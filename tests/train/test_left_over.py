"""Steps leave no tensors to Python's garbage collector, which comes when it likes: a GPU would fill up meanwhile."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from freescale.recipe import assembly
from freescale.train.gc_freeze import GcFreeze
from freescale.train.loop import train
from tests.padded_runs import padded_capture
from tests.ranks import run_on_ranks
from tests.small_run import make_run

QUIET, COUNTED = 6, 12
RECIPES = {
    "hstu": ("model.layers=2", "model.time_bias=true", "model.dropout=0.2"),
    "sasrec": ("model.kind=sasrec", "model.layers=2", "model.heads=2", "model.dropout=0.2"),
    "features": ("synthetic.features=true", "tables.user.map=zero_collision", "tables.user.rows=128"),
    "experts": ("ffn.kind=moe", "ffn.hidden=16", "moe.experts=4", "moe.top_k=2"),
}
SCHEDULES = {
    "prioritized": (),
    "postponed": ("pipeline.postpone=on",),
    "plain": ("pipeline.prioritized=false",),
}


def tensors_left_over(rank: int, recipe: tuple[str, ...], folder: Path, padded: bool = False) -> list[str]:
    """Shapes of the tensors that only a collection would have let go of, of some steps in the middle of a run."""
    steps, step_done, found = 0, GcFreeze.step_done, list[str]()

    def counted(self: GcFreeze) -> None:
        nonlocal steps
        steps += 1
        if steps < QUIET:
            step_done(self)
        elif steps == QUIET:
            gc.collect()
            gc.disable()
        elif steps == COUNTED:
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            found.extend(str(tuple(each.shape)) for each in gc.garbage if isinstance(each, torch.Tensor))
            gc.garbage.clear()
            gc.enable()

    with pytest.MonkeyPatch.context() as patch:
        if padded:
            patch.setattr(assembly, "build_capture", padded_capture)
        patch.setattr(GcFreeze, "step_done", counted)
        run, _ = make_run((*recipe, f"run.steps={COUNTED + 2}", "run.eval_every=0"), folder)
        train(run)
    assert steps == COUNTED + 2
    return found


@pytest.mark.parametrize("model", RECIPES)
def test_a_rank_alone(model: str, tmp_path: Path) -> None:
    assert tensors_left_over(0, RECIPES[model], tmp_path) == []


@pytest.mark.parametrize("padded", [False, True], ids=["jagged", "padded"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks(schedule: str, padded: bool, tmp_path: Path) -> None:
    """Padded as on GPUs, where steps are recorded."""
    found = run_on_ranks(tensors_left_over, 2, (*RECIPES["hstu"], *SCHEDULES[schedule]), tmp_path, padded)
    assert found == [[], []]
