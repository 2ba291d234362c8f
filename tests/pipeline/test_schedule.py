"""Whole runs down both paths: the same losses, evaluations, parameters and optimizer state, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.pipeline import PlainSchedule, PrioritizedSchedule
from freescale.train.loop import train
from freescale.train.state.run_state import restore
from tests.effort import quick_first, slow
from tests.ranks import run_on_ranks
from tests.small_run import make_run, train_small

# Dropout, clipping, micro-batches and a schedule are on: none of them may notice the path.
RECIPE = (
    "run.steps=48",
    "run.eval_every=16",
    "run.checkpoint_every=11",
    "model.dropout=0.2",
    "optim.schedule=cosine",
    "optim.warmup_steps=9",
    "optim.clip_norm=1.0",
    "optim.accumulate=2",
    "pipeline.check=true",
    "pipeline.decide_every=null",
    "balance.refit_every=null",
)
# Each length stops for evaluations and checkpoints in the middle of the data.
SHORT = ("run.steps=10", "run.eval_every=5", "run.checkpoint_every=4")
VARIANTS = {
    "adam": ("embedding.optimizer=adam",),
    "adagrad, loader process": ("embedding.optimizer=rowwise_adagrad", "data.workers=1"),
    "sgd, one micro-batch": ("embedding.optimizer=sgd", "embedding.lr=0.1", "optim.accumulate=1"),
    "bfloat16 table, tiny chunks": ("embedding.dtype=bfloat16", "pipeline.chunk_mb=0.001"),
}


def both_paths(rank: int, recipe: tuple[str, ...], folder: str) -> list[dict[str, Any]]:
    return [
        train_small((*recipe, f"pipeline.prioritized={way}"), f"{folder}/{way}") for way in ("false", "true")
    ]


def assert_same_bits(plain: dict[str, Any], ours: dict[str, Any], first_step: int = 0) -> None:
    assert ours["losses"] == plain["losses"][first_step:]
    for name, values in plain["tensors"].items():
        np.testing.assert_array_equal(ours["tensors"][name], values, err_msg=name)
    quality = [{k: v for k, v in event.items() if "@" in k} for event in plain["evals"]]
    assert [{k: v for k, v in e.items() if "@" in k} for e in ours["evals"]] == quality[-len(ours["evals"]) :]


@pytest.mark.parametrize("length", [SHORT, slow(())], ids=["short", "whole"])
@pytest.mark.parametrize(
    "variant", quick_first(VARIANTS, "adagrad, loader process", "bfloat16 table, tiny chunks")
)  # adam: below
def test_a_run_has_the_bits_of_the_plain_run(variant, length, tmp_path):
    recipe = (*RECIPE, *VARIANTS[variant], *length)
    for plain, ours in run_on_ranks(both_paths, 2, recipe, str(tmp_path), timeout=100):
        assert_same_bits(plain, ours)


def interrupted(
    rank: int, length: tuple[str, ...], stops: tuple[int, int], folder: str
) -> list[dict[str, Any]]:
    """A plain run to the end; then runs that start from checkpoints of other runs, in the middle of the data."""
    recipe = (*RECIPE, *length, "run.keep=9")
    plain = train_small((*recipe, "pipeline.prioritized=false"), f"{folder}/plain")
    first = train_small((*recipe, "pipeline.prioritized=true"), f"{folder}/first")
    results = [plain, first]
    for name, step in zip(("first", "plain"), stops):
        path = Path(folder, name, "checkpoints", f"step-{step:08d}")
        results.append(train_small(recipe, f"{folder}/from-{name}-{step}", resume_from=path))
    return results


@pytest.mark.parametrize(("length", "stops"), [(SHORT, (8, 4)), slow((), (33, 22))], ids=["short", "whole"])
def test_a_run_resumed_at_any_checkpoint_of_either_path_goes_on_bit_for_bit(length, stops, tmp_path):
    plain, *others = run_on_ranks(interrupted, 2, length, stops, str(tmp_path), timeout=110)[0]
    for ours, first_step in zip(others, (0, *stops)):
        assert_same_bits(plain, ours, first_step)


def metrics(rank: int, way: str, folder: str) -> list[dict[str, Any]]:
    run, recorder = make_run((*RECIPE, "run.steps=6", f"pipeline.prioritized={way}"), f"{folder}/{way}")
    train(run, resume_from=None)
    return recorder.of("step")


def test_overlap_exposed_bytes_and_parked_rows_are_logged(tmp_path):
    plain, ours = (run_on_ranks(metrics, 2, way, str(tmp_path))[0] for way in ("false", "true"))
    assert ours[0]["overlap"] == 0, "nobody comes before the first batch, and nothing hides its rows"
    assert ours[0]["exposed_bytes"] > 0.5 * plain[0]["exposed_bytes"]
    for before, after in list(zip(plain, ours))[1:]:
        assert before["parked_rows"] == before["hidden_bytes"] == 0
        assert 0 < after["exposed_bytes"] < before["exposed_bytes"]
        assert after["hidden_bytes"] > 0
        assert after["overlap"] > 0
        assert min(before["exposed_ms"], after["exposed_ms"]) > 0
        assert 1 <= before["busiest_owner"] == after["busiest_owner"] <= 2
        # Both ways move the same rows and gradients; this one also tells the owners what is shared.
        moved = after["exposed_bytes"] + after["hidden_bytes"]
        assert before["exposed_bytes"] < moved < 1.1 * before["exposed_bytes"]
    assert sum(event["parked_rows"] for event in ours) > 0
    assert ours[-1]["parked_rows"] == 0, "nobody comes after the last batch: its gradients go home at once"


def changes_its_way(rank: int, steps: int, folder: str) -> dict[str, Any]:
    """A switch whose trials come early; the clock of this test makes the plain way the faster one."""
    recipe = (*RECIPE[:-2], "balance.refit_every=null", "pipeline.decide_every=30", f"run.steps={steps}")
    recipe += (
        "optim.accumulate=1",
        "run.eval_every=0",
        f"run.checkpoint_every={steps}",
        "data.global_batch=6",
    )
    recipe += ("head.num_negatives=4", "pipeline.check=false")
    plain = train_small((*recipe, "pipeline.prioritized=false"), f"{folder}/plain")
    run, recorder = make_run(recipe, f"{folder}/ours")
    observe = run.switch.observe
    run.switch.observe = lambda step, ms: observe(step, 20.0 if run.switch.prioritized(step) else 10.0)
    train(run, resume_from=None)
    again, _ = make_run(recipe, f"{folder}/again")
    restore(again, Path(folder, "ours", "checkpoints", f"step-{steps:08d}"))
    return {
        "plain": plain["losses"],
        "ours": [event["loss"] for event in recorder.of("step")],
        "decided": recorder.of("pipeline"),
        "ahead": [event["split_ms"] > 0 for event in recorder.of("step")],
        "saved": again.switch.state(),
    }


@pytest.mark.parametrize("steps", [47, slow(70)])  # changed after 43, tried again after 60
def test_a_run_that_changes_its_way_stays_on_the_curve_and_remembers(steps, tmp_path):
    first, second = run_on_ranks(changes_its_way, 2, steps, str(tmp_path), timeout=110)
    assert first["ours"] == first["plain"]
    assert first["decided"][0]["step"] == 40
    assert first["decided"][0]["changed"]
    assert not first["decided"][0]["prioritized"]
    assert first["saved"] == second["saved"] == [[0, 1], [43, 0]]
    ahead = [True] * 30 + [False] * 10 + [True] * 3 + [False] * 17 + [True] * 10
    assert first["ahead"] == ahead[:steps]


def opened(rank: int, recipe: tuple[str, ...], folder: str) -> str:
    run, _ = make_run(recipe, folder)
    with run.open_schedule(0) as schedule:
        return type(schedule).__name__


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ((), PrioritizedSchedule),
        (("pipeline.prioritized=false",), PlainSchedule),
        (("embedding.replicate_below_mb=100",), PlainSchedule),
    ],
)
def test_several_ranks_hide_their_traffic_unless_told_otherwise_or_without_any(recipe, kind, tmp_path):
    assert run_on_ranks(opened, 2, recipe, str(tmp_path)) == [kind.__name__] * 2


def test_one_rank_takes_the_plain_path(tmp_path):
    assert opened(0, (), str(tmp_path)) == "PlainSchedule"
