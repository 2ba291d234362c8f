"""One curve for MLPerf's DLRMv4: 11 tables, anchors, context tokens of the candidate; its recipes are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from freescale.recipe import load_config
from tests.effort import slow
from tests.test_one_curve import assert_same_curve, on_ranks

RECIPES = Path(__file__).parent.parent / "recipes"


def keys_of(recipe: Path) -> tuple[str, ...]:
    """A recipe as one would type it."""
    sections = yaml.safe_load(recipe.read_text())
    return tuple(
        f"{section}.{key}={yaml.safe_dump(value, default_flow_style=True, width=10_000).split(chr(10))[0]}"
        for section, keys in sections.items()
        for key, value in keys.items()
        if section != "run"
    )


TINY = (
    *keys_of(RECIPES / "mlperf_dlrmv4_small.yaml"),
    *(
        "data.scale=3e-5",
        "data.length_scale=0.03",
        "data.max_length=24",
        "data.global_batch=10",
        "data.days=30",
    ),
    *(
        "head.anchor_history=20",
        "head.pool_events=8",
        "head.pool_window=60",
        "head.anchor_days=3",
        "head.hidden=8",
    ),
    *("model.dim=8", "model.dtype=float64", "model.positions=32", "model.time_buckets=20", "tokens.hidden=8"),
    *("run.steps=5", "run.eval_every=5", "eval.max_users=20", "optim.lr=0.01", "optim.warmup_steps=0"),
)


@pytest.mark.parametrize(
    ("num_ranks", "change"),
    [
        (2, ("optim.accumulate=2",)),
        slow(4, ("pipeline.prioritized=false",)),
        slow(2, ("balance.enabled=false", "data.order=listed")),
    ],
)
def test_ranks_do_not_change_the_curve(num_ranks, change):
    alone = tuple(key for key in change if key.startswith("data."))
    assert_same_curve(on_ranks(num_ranks, (*TINY, *change)), on_ranks(1, (*TINY, *alone)))


@pytest.mark.parametrize("name", ["mlperf_twin", "mlperf_dlrmv4_small", "mlperf_dlrmv4"])
def test_recipes_are_accepted(name):
    config = load_config(RECIPES / f"{name}.yaml")
    assert config.model.kind == "stu"
    assert config.tokens.join == "towers"
