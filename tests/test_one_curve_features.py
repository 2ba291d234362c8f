"""The promise with features: five tables of different width, optimizer and map, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from freescale.recipe import assembly
from tests.effort import slow
from tests.padded_runs import padded_capture
from tests.test_one_curve import assert_goes_on_with_other_ranks, assert_same_curve, on_ranks

# The embedded data set has features of every kind but vectors; see docs/features.md.
TABLES = (
    "synthetic.features=true",
    "model.dtype=float64",
    "tables.item.map=zero_collision",
    "tables.item.rows=256",
    "tables.item.buckets=8",
    "tables.item.eviction=lru",
    "tables.item.dim=10",
    "tables.genre.dim=5",
    "tables.genre.optimizer=sgd",
    "tables.genre.lr=0.05",
    "tables.home.dim=7",
    "tables.home.optimizer=rowwise_adagrad",
    "tables.hour.replicate_below_mb=1",
    "tables.user.map=zero_collision",
    "tables.user.rows=128",
    "tables.user.dim=6",
    "run.eval_every=40",
    "data.global_batch=10",
)


@pytest.mark.parametrize("steps", [12, slow(60)])
@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [
        slow(2, ()),  # on three ranks, then two: below
        (2, ("pipeline.prioritized=false", "balance.enabled=false", "optim.accumulate=2")),
        slow(4, ("comm.transport=host_staged", "model.dropout=0.2", "tokens.join=mlp")),
    ],
    ids=["prioritized", "plain, parts", "four ranks, mlp, dropout"],
)
def test_ranks_do_not_change_the_curve(num_ranks: int, ways: tuple[str, ...], steps: int) -> None:
    recipe = (*TABLES, *ways, f"run.steps={steps}")
    alone = on_ranks(1, recipe)
    names = {name.split(".")[1] for name in alone["tensors"] if name.startswith("table.")}
    assert names == {"item", "country", "genre", "home", "hour", "user"}
    assert_same_curve(on_ranks(num_ranks, recipe), alone)
    # It goes down, too.
    assert np.mean(alone["losses"][-4:]) < np.mean(alone["losses"][:4])


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [
        (2, ("model.dropout=0.2",)),
        slow(2, ("pipeline.prioritized=false", "optim.accumulate=2")),
        slow(4, ("tokens.join=mlp", "balance.enabled=false")),
    ],
    ids=["prioritized", "plain, parts", "four ranks, mlp"],
)
def test_padded_batches_do_not_change_the_curve(
    num_ranks: int, ways: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As captured steps on GPUs take them; no map learns ids there."""
    maps = (
        "tables.item.map=direct",
        "tables.item.dim=10",
        "tables.user.map=hash",
        "tables.user.rows=128",
        "tables.user.dim=6",
    )
    kept = [key for key in TABLES if not key.startswith(("tables.item.", "tables.user."))]
    recipe = (*kept, *maps, *ways, "run.steps=8")
    alone = on_ranks(1, recipe)
    monkeypatch.setattr(assembly, "build_capture", padded_capture)
    assert_same_curve(on_ranks(num_ranks, recipe), alone)


@pytest.mark.parametrize(
    "model", [("model.kind=sasrec",), slow(("model.kind=llama",)), slow(("ffn.kind=moe",))]
)
def test_other_models_and_places_keep_the_curve(model: tuple[str, ...]) -> None:
    places = (
        "features.item.of=event", "features.item.is=id",
        "features.country.of=user", "features.country.is=id", "features.country.values=[de,fr,in,us]",
        "features.country.as=join",
        "features.action.of=event", "features.action.is=bits", "features.action.names=[view,like,share]",
        "features.action.outcome=true", "features.action.as=after",
        "features.price.of=item", "features.price.is=number", "features.price.edges=[1.0,5.0,20.0]",
    )  # fmt: skip
    recipe = (
        "synthetic.features=true", "model.dtype=float64", "run.steps=10", "run.eval_every=10",
        "data.global_batch=8", *places, *model,
    )  # fmt: skip
    assert_same_curve(on_ranks(2, recipe), on_ranks(1, recipe))


@pytest.mark.parametrize(("part", "ranks"), [(4, (3, 2)), slow(20, (4, 2, 3, 1))])
def test_a_checkpoint_goes_on_with_other_ranks(tmp_path: Path, part: int, ranks: tuple[int, ...]) -> None:
    recipe = (*TABLES, "run.keep=10", f"run.eval_every={part}")
    alone = on_ranks(1, (*recipe, f"run.steps={len(ranks) * part}"))
    assert_goes_on_with_other_ranks(recipe, tmp_path, alone, part=part, ranks=ranks)


@pytest.mark.slow
def test_prioritized_and_plain_communication_give_the_same_bits() -> None:
    recipe = (*TABLES, "model.dtype=float32", "run.steps=12")
    one, other = (on_ranks(2, (*recipe, f"pipeline.prioritized={on}")) for on in ("true", "false"))
    assert one["losses"] == other["losses"]
    for name, value in one["tensors"].items():
        assert np.array_equal(value, other["tensors"][name]), name
