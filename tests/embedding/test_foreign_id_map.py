"""Id maps of somebody else, by a formula or learning: whole runs on one rank and on two, saved, told of, exported."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.embedding.foreign_first_come
import tests.extend.plugins.own_id_map  # noqa: F401  (what --plugin does)
from freescale.app.run.opened_run import known_items
from freescale.embedding import IdMap, learns_ids
from freescale.recipe import build_run, build_source, load_config
from freescale.train.log.events import Progress
from freescale.train.loop import load_run, train
from tests.effort import slow
from tests.ranks import run_on_ranks
from tests.small_run import SMALL, Recorder, full_tensors, these_ranks

RECIPE = (*SMALL, "model.dtype=float64", "run.eval_every=10", "run.checkpoint_every=10")


def train_with(rank: int, id_map: str, folder: str, steps: int, *overrides: str) -> dict[str, Any]:
    config = load_config(None, [*RECIPE, f"run.steps={steps}", f"run.out={folder}", *overrides])
    config = dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, id_map=id_map))
    recorder = Recorder()
    run = build_run(config, build_source(config), these_ranks(), Progress([recorder]))
    path = Path(folder) / "checkpoints" / f"step-{steps - 10:08d}"
    train(run, resume_from=path if path.exists() else None)
    load_run(run, Path(folder) / "checkpoints" / f"step-{steps:08d}")
    return {
        "losses": [event["loss"] for event in recorder.of("step")],
        "tensors": full_tensors(run),
        "ids": recorder.of("ids"),
        "known": known_items(run).tolist(),
        "learns": run.state.id_maps["item"].learns,
    }


@pytest.mark.parametrize(
    ("id_map", "prioritized"),
    [
        ("modulo", "false"),
        ("test_first_come", "true"),
        slow("modulo", "true"),
        slow("test_first_come", "false"),
    ],
)
def test_two_ranks_follow_one_and_go_on_alone(id_map: str, prioritized: str, tmp_path: Path) -> None:
    alone = train_with(0, id_map, str(tmp_path / "1"), 20)
    how = f"pipeline.prioritized={prioritized}"
    first = run_on_ranks(train_with, 2, id_map, str(tmp_path / "2"), 10, how, timeout=110)[0]
    then = train_with(0, id_map, str(tmp_path / "2"), 20)
    np.testing.assert_allclose(first["losses"] + then["losses"], alone["losses"], rtol=1e-9)
    for name, value in alone["tensors"].items():
        np.testing.assert_allclose(then["tensors"][name], value, rtol=0, atol=1e-8, err_msg=name)
    assert alone["learns"] == (id_map == "test_first_come")
    if alone["learns"]:
        assert then["known"] == alone["known"]
        assert then["known"] == sorted(set(alone["tensors"]["ids.ids"].ravel().tolist()) - {-(2**63)})
        told = alone["ids"][-1]
        assert told["asked"] == told["hits"] + told["inserts"] + told["collisions"] > 0
        assert told["occupancy"] == pytest.approx(len(then["known"]) / told["slots"])
        assert told["probe_histogram"] == {}
    else:
        assert not alone["ids"]
        assert len(alone["known"]) > 100


def test_they_are_known_by_their_protocol() -> None:
    class Formula:
        num_rows, learns = 5, False

    assert not learns_ids(Formula())  # type: ignore[arg-type]
    assert "learns" in IdMap.__annotations__
    code = (Path(__file__).parent / "foreign_first_come.py").read_text().splitlines()
    assert len([line for line in code if line.strip()]) <= 70
