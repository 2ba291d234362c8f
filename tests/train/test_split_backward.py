"""Weight gradients after the rows have left: the bits of the plain order, for every model and way to train it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.effort import slow
from tests.ranks import run_on_ranks
from tests.small_run import make_run, train_small

POSTPONED, PLAIN = "pipeline.postpone=on", "pipeline.postpone=off"
MODELS = {
    "hstu": ("model.layers=2", "model.time_bias=true", "model.dropout=0.2"),
    "sasrec": ("model.kind=sasrec", "model.layers=2", "model.heads=2", "model.dropout=0.2"),
    "llama": ("model.kind=llama", "model.layers=2", "model.heads=2", "model.kv_heads=1"),
    "experts": ("ffn.kind=moe", "ffn.hidden=16", "moe.experts=4", "moe.top_k=2", "moe.parallel=true"),
}


def both_ways(rank: int, recipe: tuple[str, ...], folder: Path, steps: int) -> None:
    """Runs of these ranks in both orders; fails unless losses and every tensor agree in every bit."""
    recipe = (*recipe, f"run.steps={steps}", "run.eval_every=0", "pipeline.decide_every=null")
    ours = train_small((*recipe, POSTPONED), folder / "postponed")
    assert_same_bits(ours, train_small((*recipe, PLAIN), folder / "plain"))


def assert_same_bits(ours: dict[str, Any], plain: dict[str, Any], *, first_step: int = 0) -> None:
    assert ours["losses"] == plain["losses"][first_step:]
    assert ours["tensors"].keys() == plain["tensors"].keys()
    for name, value in plain["tensors"].items():
        np.testing.assert_array_equal(ours["tensors"][name], value, err_msg=name)


@pytest.mark.parametrize("num_ranks", [2, slow(3)])
@pytest.mark.parametrize("model", [each if each == "experts" else slow(each) for each in MODELS])
def test_every_model_learns_the_same_bits(num_ranks: int, model: str, tmp_path: Path) -> None:
    run_on_ranks(both_ways, num_ranks, MODELS[model], tmp_path, 12, timeout=110)


@pytest.mark.parametrize(
    "change",
    [
        slow(
            ("optim.accumulate=3", "optim.schedule=cosine", "optim.warmup_steps=5", "optim.weight_decay=0.01")
        ),
        ("optim.clip_norm=0.1", "pipeline.check=true", "optim.accumulate=3", "optim.weight_decay=0.01"),
        (
            "pipeline.postpone_mb=0.01",
            "embedding.optimizer=rowwise_adagrad",
            "embedding.id_map=zero_collision",
        ),
        slow(("pipeline.postpone_mb=0", "embedding.id_map=zero_collision")),
        ("data.global_batch=2",),
    ],
    ids=[
        "accumulation and schedule",
        "clipping",
        "bounded, learnt ids",
        "nothing kept",
        "empty ranks",
    ],
)
def test_every_way_to_train_gives_the_same_bits(change: tuple[str, ...], tmp_path: Path) -> None:
    run_on_ranks(both_ways, 2, (*MODELS["hstu"], *change), tmp_path, 10, timeout=110)


def resumed(rank: int, folder: Path) -> None:
    """Both ways in turn: a run that changes its order in the middle goes on in the same bits."""
    recipe = (*MODELS["hstu"], "run.steps=10", "run.eval_every=0", "run.checkpoint_every=4", "run.keep=10")
    plain = train_small((*recipe, PLAIN), folder / "plain")
    train_small((*recipe, POSTPONED), folder / "postponed")
    for step, order in ((4, POSTPONED), (8, PLAIN)):
        saved = folder / "postponed" / "checkpoints" / f"step-{step:08d}"
        again = train_small((*recipe, order), folder / "postponed", resume_from=saved)
        assert_same_bits(again, plain, first_step=step)


def test_a_run_goes_on_in_either_order(tmp_path: Path) -> None:
    run_on_ranks(resumed, 2, tmp_path, timeout=110)


def kept(rank: int, megabytes: float) -> tuple[int, int]:
    run, _ = make_run((*MODELS["llama"], POSTPONED, f"pipeline.postpone_mb={megabytes}", "run.steps=2"))
    with run.open_schedule(0) as schedule:
        for ready in schedule:
            run.train_step.run(ready, schedule)
    split = run.train_step._split
    assert split is not None
    return split.postponed.num_postponed, split.postponed.most_kept_bytes


def test_what_is_kept_has_a_bound() -> None:
    [(unbounded, most), _] = run_on_ranks(kept, 2, 64)
    assert unbounded == 2 * 2 * 4  # two steps of two layers with four products each
    bound = most // 2 / 2**20
    [(bounded, most), _] = run_on_ranks(kept, 2, bound)
    assert 0 < bounded < unbounded
    assert most <= bound * 2**20
