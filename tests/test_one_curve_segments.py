"""One curve with compressed histories: ranks, balance, the route of rows and kills do not change what is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.model.compression.compressor import Compressor
from tests.effort import slow
from tests.ranks import run_on_ranks
from tests.small_run import make_run
from tests.test_one_curve import assert_same_curve, on_ranks

SEGMENTS = ("segments.recent=6", "segments.length=8", "segments.summaries=2", "synthetic.mean_length=20")
RECIPE = (*SEGMENTS, "model.layers=2", "model.dtype=float64", "run.steps=60", "run.eval_every=30")


@pytest.fixture(scope="module", params=[12, slow(60)])
def steps(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def recipe(steps: int) -> tuple[str, ...]:
    return (*RECIPE, f"run.steps={steps}", f"run.eval_every={steps // 2}")


@pytest.fixture(scope="module")
def alone(recipe: tuple[str, ...]) -> dict[str, Any]:
    return on_ranks(1, recipe)


def test_the_summaries_are_learnt() -> None:
    alone = on_ranks(1, RECIPE)
    assert np.mean(alone["losses"][-10:]) < 0.9 * np.mean(alone["losses"][:10])
    fresh, _ = make_run(RECIPE)
    name = next(name for name in alone["tensors"] if name.endswith("encoder.summaries"))
    before = fresh.state.model.state_dict()["encoder.summaries"].numpy()
    assert before.shape == (2, 12)
    assert np.abs(alone["tensors"][name] - before).mean() > 1e-2


@pytest.mark.parametrize(
    ("num_ranks", "change"),
    [
        (3, ()),
        slow(4, ()),
        slow(2, ("balance.enabled=false",)),
        (2, ("pipeline.prioritized=false", "optim.accumulate=3")),
    ],
    ids=["3 ranks", "4 ranks", "unbalanced", "plain and in micro-batches"],
)
def test_ranks_and_speed_features_keep_the_curve(
    num_ranks: int, change: tuple[str, ...], recipe: tuple[str, ...], alone: dict[str, Any]
) -> None:
    assert_same_curve(on_ranks(num_ranks, (*recipe, *change)), alone)


def test_softmax_attention_keeps_the_curve() -> None:
    recipe = (*RECIPE, "run.steps=8", "run.eval_every=8", "model.kind=sasrec")
    assert_same_curve(on_ranks(2, recipe), on_ranks(1, recipe))


def test_a_run_on_two_ranks_goes_on_with_one(
    tmp_path: Path, steps: int, recipe: tuple[str, ...], alone: dict[str, Any]
) -> None:
    half = steps // 2
    on_ranks(2, (*recipe, f"run.steps={half}"), str(tmp_path))
    path = tmp_path / "checkpoints" / f"step-{half:08d}"
    assert_same_curve(on_ranks(1, recipe, str(tmp_path), path), alone, first_step=half)


def _evaluate_both_ways(rank: int, folder: str) -> Any:
    run, _ = make_run(RECIPE, folder)
    torch.manual_seed(7)
    for param in run.state.model.parameters():
        param.data.normal_(std=0.4)
    masked = run.evaluation.evaluator.run(run.evaluation.test)
    run.evaluation.evaluator.__dict__["cached"] = True
    used: list[int] = []
    compress = Compressor.compress

    def watched(self: Compressor, *args: Any) -> Any:
        used.append(len(args[1]))
        return compress(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compressor, "compress", watched)
        cached = run.evaluation.evaluator.run(run.evaluation.test)
    return masked, cached, used


def test_serving_from_caches_ranks_as_the_masked_pass_does(tmp_path: Path) -> None:
    masked, cached, used = _evaluate_both_ways(0, str(tmp_path))
    assert used
    assert cached == masked
    for result in run_on_ranks(_evaluate_both_ways, 2, str(tmp_path), timeout=110):
        assert result[1] == pytest.approx(masked)


def test_planned_costs_count_what_the_mask_leaves() -> None:
    run, _ = make_run((*SEGMENTS, "data.max_length=60"))
    whole, _ = make_run(("synthetic.mean_length=20", "data.max_length=60"))
    work = run.train_step.timer._work
    lengths = np.array([3, 6, 14, 60])
    # 60 events: 7 segments, the last of 6, each with 2 summaries, and 6 recent.
    assert work.tokens(lengths).tolist() == [3, 6, 16, 60 + 14]
    brute = 6 * 55 + 36 + 21 + 10 * 2 * 15 + 8 * 2 * 6 + 6 * 2 * 7
    assert work.squares(lengths)[-1] == 2 * brute - 74
    assert work.squares(lengths)[0] == 9
    assert whole.train_step.timer._work.squares(lengths)[-1] == 3600
