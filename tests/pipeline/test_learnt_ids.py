"""Ids that get their rows two batches ahead, from the communication thread, get those of the plain path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.embedding.ids.sharded_id_map import ShardedIdMap
from freescale.pipeline.prioritized.pipeline import LOOK_AHEAD
from freescale.recipe.embedding import BATCHES_IN_FLIGHT as _BATCHES_UNDER_WAY
from freescale.recipe.embedding import EmbeddingSection
from freescale.train.loop import train
from tests.effort import slow
from tests.ranks import run_on_ranks
from tests.small_run import full_tensors, make_run

# 150 items in 128 rows, a few of them in a step: ids come and go all the time, also right before and after an
# evaluation and a checkpoint.
RECIPE = (
    "embedding.id_map=zero_collision",
    "embedding.rows=128",
    "embedding.buckets=8",
    "embedding.max_probe=8",
    "head.num_negatives=2",
    "data.global_batch=6",
    "run.steps=48",
    "run.eval_every=16",
    "run.checkpoint_every=11",
    "run.keep=9",
    "pipeline.check=true",
    "pipeline.decide_every=null",
    "balance.refit_every=null",
)
# Checkpoints after 6 and 12 steps.
SHORT = ("run.steps=16", "run.eval_every=8", "run.checkpoint_every=6")
VARIANTS = {
    "lru": ("embedding.eviction=lru",),
    "ttl, sgd, loader process": (
        *("embedding.eviction=ttl", "embedding.ttl=4", "embedding.optimizer=sgd", "data.workers=1"),
    ),
    "lfu, admission, a trial of the plain way": (
        *("embedding.eviction=lfu", "embedding.admit_after=2", "pipeline.decide_every=30"),
    ),
    "lru, collectives": ("embedding.eviction=lru", "comm.transport=collective"),
}


def trained(recipe: tuple[str, ...], folder: str, *, resume_from: Path | None = None) -> dict[str, Any]:
    """Everything learnt, and everything told about ids."""
    run, recorder = make_run(recipe, folder)
    train(run, resume_from=resume_from)
    assert isinstance(run.state.id_maps["item"], ShardedIdMap)
    ids, rows = run.state.id_maps["item"].residents()
    pictures = [{k: v for k, v in e.items() if k not in ("time", "warning")} for e in recorder.of("ids")]
    return {
        "losses": [event["loss"] for event in recorder.of("step")],
        "counts": [
            {k: v for k, v in e.items() if k.startswith("id_") or k == "step"} for e in recorder.of("step")
        ],
        "pictures": pictures,
        "quality": [{k: v for k, v in e.items() if "@" in k} for e in recorder.of("eval")],
        "residents": dict(zip(ids.tolist(), rows.tolist())),
        "tensors": full_tensors(run),
        "ahead": [event.get("split_ms", 0) > 0 for event in recorder.of("step")],
    }


def assert_same_bits(plain: dict[str, Any], ours: dict[str, Any], first_step: int = 0) -> None:
    assert ours["losses"] == plain["losses"][first_step:]
    assert ours["counts"] == plain["counts"][first_step:]
    assert ours["quality"] == plain["quality"][-len(ours["quality"]) :]
    assert ours["residents"] == plain["residents"]
    assert any(name.startswith("ids.") for name in plain["tensors"])
    for name, values in plain["tensors"].items():
        np.testing.assert_array_equal(ours["tensors"][name], values, err_msg=name)
    assert ours["pictures"] == [event for event in plain["pictures"] if event["step"] > first_step]


def test_the_guard_covers_all_batches_under_way() -> None:
    """Those looked ahead to, and the one whose gradients may be parked; `config` cannot ask the pipeline."""
    assert EmbeddingSection().guard == _BATCHES_UNDER_WAY == LOOK_AHEAD + 1


def both_paths(rank: int, recipe: tuple[str, ...], folder: str) -> list[dict[str, Any]]:
    return [trained((*recipe, f"pipeline.prioritized={way}"), f"{folder}/{way}") for way in ("false", "true")]


TRIAL = "lfu, admission, a trial of the plain way"


@pytest.mark.parametrize(
    ("variant", "length"),
    [
        ("lru, collectives", SHORT),
        *(slow(variant, SHORT) for variant in VARIANTS if variant not in ("lru, collectives", TRIAL)),
        *(slow(variant, ()) for variant in VARIANTS if variant != TRIAL),
        (TRIAL, ("run.steps=36", "run.eval_every=18")),  # its trial starts with step 30
        slow(TRIAL, ()),
    ],
)
def test_ids_get_the_rows_of_the_plain_path(variant: str, length: tuple[str, ...], tmp_path: Path) -> None:
    recipe = (*RECIPE, *VARIANTS[variant], *length)
    for plain, ours in run_on_ranks(both_paths, 2, recipe, str(tmp_path), timeout=100):
        assert_same_bits(plain, ours)
        assert sum(event["evictions"] for event in plain["pictures"]) > 20
        assert not any(plain["ahead"])
        assert sum(ours["ahead"]) >= 0.625 * len(ours["losses"])  # 30 of 48


def interrupted(
    rank: int, length: tuple[str, ...], stops: tuple[int, int], folder: str
) -> list[dict[str, Any]]:
    """Both paths to the end; then runs that start from checkpoints of either, in the middle."""
    recipe = (*RECIPE, "embedding.eviction=lru", *length)
    results = both_paths(rank, recipe, folder)
    for name, step in zip(("true", "false"), stops):
        path = Path(folder, name, "checkpoints", f"step-{step:08d}")
        results.append(trained(recipe, f"{folder}/from-{name}-{step}", resume_from=path))
    return results


@pytest.mark.parametrize(("length", "stops"), [(SHORT, (12, 6)), slow((), (33, 22))], ids=["short", "whole"])
def test_ids_of_a_checkpoint_of_either_path_are_those_of_its_step(
    length: tuple[str, ...], stops: tuple[int, int], tmp_path: Path
) -> None:
    for plain, *others in run_on_ranks(interrupted, 2, length, stops, str(tmp_path), timeout=110):
        for ours, first_step in zip(others, (0, *stops), strict=True):
            assert_same_bits(plain, ours, first_step)
