"""One curve for every kind of item encoder: who encodes an item changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.recipe import build_source, load_config
from tests.effort import slow
from tests.item_files import write_made_up_content, write_made_up_texts
from tests.small_run import SMALL
from tests.test_one_curve import assert_same_curve, on_ranks

TEXT = ("items.kind=text", "items.dim=8", "items.heads=2", "items.layers=1")
ALONE = ("items.add_ids=false",)
HASHED = ("embedding.id_map=hash", "embedding.rows=37")
# Everything at once: summaries of long histories, a decoder with shared heads, texts, dropout in both.
SEGMENTED = ("segments.recent=6", "segments.length=8", "segments.summaries=2", "model.kind=llama")
SEGMENTED += ("model.heads=2", "model.kv_heads=1", "model.dropout=0.2", "items.dropout=0.1")


@pytest.fixture(scope="module", params=[8, slow(16)])
def steps(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory, steps: int) -> dict[str, tuple[str, ...]]:
    short = ("model.dtype=float64", f"run.steps={steps}", f"run.eval_every={steps}", "optim.lr=0.01")
    folder: Path = tmp_path_factory.mktemp("items")
    num_items = len(build_source(load_config(None, SMALL)).items.ids)
    texts = (f"items.file={write_made_up_texts(folder / 'texts.parquet', 150)}",)
    content = f"items.file={write_made_up_content(folder / 'content.npy', num_items)}"
    return {
        "text": (*short, *TEXT, *texts, *ALONE),
        "text and ids": (*short, *TEXT, *texts),
        "text and hashed ids": (*short, *TEXT, *texts, *HASHED),
        "text of a segmented decoder": (*short, *TEXT, *texts, *SEGMENTED),
        "content": (*short, "items.kind=content", content, *ALONE),
        "content and ids": (*short, "items.kind=content", content),
    }


@pytest.fixture(scope="module")
def curves(recipes: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    return {kind: on_ranks(1, recipe) for kind, recipe in recipes.items()}


def test_every_curve_is_its_own_and_goes_down(curves: dict[str, dict[str, Any]]) -> None:
    lasts = [np.mean(curve["losses"][-3:]) for curve in curves.values()]
    assert len(set(lasts)) == len(curves)
    for curve in curves.values():
        assert np.mean(curve["losses"][-3:]) < np.mean(curve["losses"][:3])


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        ("text", 2),
        slow("text", 4),
        slow("text and ids", 3),  # two: below
        slow("text and hashed ids", 2),
        ("text of a segmented decoder", 2),
        slow("content", 2),
        ("content and ids", 3),
        slow("content and ids", 4),
    ],
)
def test_ranks_do_not_change_the_curve(
    kind: str, num_ranks: int, recipes: dict[str, tuple[str, ...]], curves: dict[str, dict[str, Any]]
) -> None:
    assert_same_curve(on_ranks(num_ranks, recipes[kind]), curves[kind])


@pytest.mark.parametrize(
    "change",
    [
        ("optim.accumulate=3", "balance.enabled=false", "pipeline.prioritized=false"),
        ("items.chunk=20", "eval.item_chunk=11", "eval.batch=9"),
    ],
    ids=["micro-batches, not balanced, plain", "encoded in chunks"],
)
def test_speed_features_do_not_change_the_curve(
    change: tuple[str, ...], recipes: dict[str, tuple[str, ...]], curves: dict[str, dict[str, Any]]
) -> None:
    assert_same_curve(on_ranks(2, (*recipes["text and ids"], *change)), curves["text and ids"])


def test_more_ranks_than_samples(recipes: dict[str, tuple[str, ...]]) -> None:
    recipe = (*recipes["text"], "data.global_batch=2", "run.steps=5", "run.eval_every=5", "eval.max_users=20")
    assert_same_curve(on_ranks(3, recipe), on_ranks(1, recipe))


@pytest.mark.slow
def test_prioritized_and_plain_communication_give_the_same_bits(recipes: dict[str, tuple[str, ...]]) -> None:
    recipe = (*recipes["text and ids"], "pipeline.decide_every=null", "balance.refit_every=null")
    early, plain = (
        on_ranks(2, (*recipe, f"pipeline.prioritized={way}", "pipeline.check=true"))
        for way in ("true", "false")
    )
    assert early["losses"] == plain["losses"]
    for name, value in early["tensors"].items():
        np.testing.assert_array_equal(value, plain["tensors"][name], err_msg=name)


def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    tmp_path: Path, steps: int, recipes: dict[str, tuple[str, ...]], curves: dict[str, dict[str, Any]]
) -> None:
    half = steps // 2
    recipe = tuple(key for key in recipes["text and ids"] if not key.startswith("run."))
    on_ranks(2, (*recipe, f"run.steps={half}", f"run.eval_every={half}"), str(tmp_path))
    path = tmp_path / "checkpoints" / f"step-{half:08d}"
    rest = on_ranks(1, (*recipe, f"run.steps={steps}"), str(tmp_path), path)
    np.testing.assert_allclose(rest["losses"], curves["text and ids"]["losses"][half:], rtol=1e-9)
