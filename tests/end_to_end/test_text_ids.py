"""From text ids to recommendations in the same ids, with every id map, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale import load_export
from freescale.app.run.opened_run import evaluate_run, export_run
from freescale.data.preparing.preparation import prepare
from freescale.data.sources.parquet import ParquetSource
from freescale.embedding import NumberedMap
from freescale.errors import DataError
from tests.effort import slow
from tests.ranks import run_on_ranks
from tests.small_run import make_run, train_small

NUM_USERS, NUM_ITEMS = 60, 40
MAPS = {
    "direct": (),
    "hash": ("embedding.rows=64",),
    "zero_collision": (),
}
KINDS = {
    "text": lambda n: f"B{n:03d}-ü",
    "negative": lambda n: str(n - NUM_ITEMS // 2),
    "unsigned": lambda n: str(2**64 - 1 - n),
}


def events(kind: str) -> str:
    """Users walk around a circle of items, from a place of their own."""
    drawn = np.random.default_rng(5)
    lines = ["user,item,time"]
    for user in range(NUM_USERS):
        start, length = int(drawn.integers(0, NUM_ITEMS)), int(drawn.integers(5, 12))
        lines += [
            f"user-{user},{KINDS[kind]((start + n) % NUM_ITEMS)},{1_700_000_000 + 60 * n}"
            for n in range(length)
        ]
    return "\n".join(lines) + "\n"


def prepared(tmp_path: Path, kind: str) -> Path:
    (tmp_path / "raw.csv").write_text(events(kind), encoding="utf-8")
    prepare(tmp_path / "raw.csv", tmp_path / "data")
    return tmp_path / "data"


def overrides(data: Path, id_map: str, steps: int = 6) -> list[str]:
    return [
        f"data.path={data}",
        f"run.steps={steps}",
        "model.dtype=float64",
        "data.global_batch=16",
        f"embedding.id_map={id_map}",
        *MAPS[id_map],
    ]


def _losses(rank: int, overrides: list[str], folder: Path) -> Any:
    return train_small(overrides, folder)["losses"]


@pytest.mark.parametrize(
    ("kind", "id_map"),
    [("text", "zero_collision"), ("negative", "direct"), slow("text", "direct"), slow("text", "hash")],
)
def test_the_curve_is_the_same_on_two_ranks(tmp_path: Path, kind: str, id_map: str) -> None:
    options = overrides(prepared(tmp_path, kind), id_map, steps=4)
    alone = train_small(options)["losses"]
    for losses in run_on_ranks(_losses, 2, options, tmp_path / "run", timeout=100):
        np.testing.assert_allclose(losses, alone, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_direct_map_has_a_row_for_every_id_that_occurs(tmp_path: Path, kind: str) -> None:
    run, _ = make_run(overrides(prepared(tmp_path, kind), "direct"))
    assert isinstance(run.state.id_maps["item"], NumberedMap)
    assert run.state.id_maps["item"].num_rows == NUM_ITEMS


@pytest.mark.parametrize("id_map", MAPS)
def test_recommendations_come_in_the_users_own_ids(tmp_path: Path, id_map: str) -> None:
    data = prepared(tmp_path, "text")
    train_small([*overrides(data, id_map, steps=12), "run.eval_every=12"], tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(_recipe(data, id_map, tmp_path / "run"))
    assert 0 <= evaluate_run(tmp_path / "run", device="cpu")["metrics"]["hr@10"] <= 1
    served = load_export(export_run(tmp_path / "run", tmp_path / "out"))
    name = KINDS["text"]
    history = [name(3), "nobody knows me", name(4)]
    times = [1_700_000_000, 1_700_000_060, 1_700_000_120]
    answer = served.recommend(history, times=times, k=5)
    assert len(answer) == 5
    assert {item for item, _ in answer} <= {name(n) for n in range(NUM_ITEMS)} - set(history)
    assert served.unknown(history) == ["nobody knows me"]
    assert answer == served.recommend([name(3), name(4)], times=times[::2], k=5)
    with pytest.raises(DataError, match=r"(?s)items must be text.*3 \(int\)"):
        served.recommend([3], times=[1])


def test_unsigned_ids_come_back_as_they_were(tmp_path: Path) -> None:
    data = prepared(tmp_path, "unsigned")
    train_small([*overrides(data, "direct"), "run.eval_every=6"], tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(_recipe(data, "direct", tmp_path / "run"))
    served = load_export(export_run(tmp_path / "run", tmp_path / "out"))
    answer = served.recommend([2**64 - 1, 2**64 - 2], times=[1_700_000_000] * 2, k=50)
    assert {item for item, _ in answer} == {2**64 - 1 - n for n in range(2, NUM_ITEMS)}
    with pytest.raises(DataError, match=r"(?s)items must be whole numbers.*-1.*0 to 2\^64"):
        served.recommend([-1], times=[1])


def _recipe(data: Path, id_map: str, out: Path) -> str:
    from freescale.recipe import load_config
    from tests.small_run import SMALL

    return load_config(None, [*SMALL, *overrides(data, id_map, 12), f"run.out={out}"]).to_yaml()


def test_a_direct_map_of_other_data_refuses_ids_it_has_not_learnt(tmp_path: Path) -> None:
    data = prepared(tmp_path, "text")
    run, _ = make_run(overrides(data, "direct"))
    ids, id_map = ParquetSource(data).items.ids, run.state.id_maps["item"]
    kept = id_map.state_dict()["numbered_ids"]
    assert kept.tolist() == ids.tolist()
    # As if a checkpoint of data with another catalogue had been loaded.
    kept[0] -= 1
    id_map.restored()
    with pytest.raises(DataError, match="an id has no row"):
        id_map.rows(torch.from_numpy(ids.copy()))
