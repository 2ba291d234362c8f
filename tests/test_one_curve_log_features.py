"""The promise over a log with features and with tasks: the same losses on any ranks, and versions that answer alike."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.app.run.opened_run import open_run, write_run_export
from freescale.app.serving.publishing import publish_run
from freescale.data import append_log
from freescale.exports import ChainModel, load_export, load_version, read_version
from freescale.recipe import load_config
from freescale.train import load_run, read_meta, saved_in
from freescale.train.loop import train
from tests.effort import slow
from tests.grown_log import MAX_LENGTH, ON_A_LOG, events_of_day
from tests.ranks import run_on_ranks
from tests.small_run import SMALL, make_run

DAYS = 3
SCHEMA = {
    "time": {"of": "event", "is": "time"},
    "action": {"of": "event", "is": "number", "outcome": True},
    "device": {"of": "event", "is": "id", "values": ["phone", "desk", "tv"]},
    "shop": {"of": "event", "is": "id", "rows": 64, "map": "zero_collision"},
    "price": {"of": "event", "is": "number", "scale": "log"},
}
TASKS = ("head.kind=tasks", "head.tasks=like = action > 0", "head.candidates=3", "eval.metric=auc/like")
KINDS = {"features": ((), SCHEMA), "tasks": (TASKS, None), "both": (TASKS, SCHEMA)}


def _grow(folder: Path, schema: dict[str, Any] | None) -> Path:
    for day in range(DAYS):
        lines = [
            f"{user},{item},{time},{(user + item) % 2},{('phone', 'desk', 'tv')[item % 3]},{time % 23},{item}.5\n"
            for user, item, time in events_of_day(day)
        ]
        file = folder / f"day-{day}.csv"
        file.write_text("user,item,time,action,device,shop,price\n" + "".join(lines))
        append_log(
            folder / "log",
            file,
            max_length=MAX_LENGTH,
            schema=None if day else schema,
        )
    return folder / "log"


def learn(rank: int, overrides: tuple[str, ...], out: str, resume_from: Path | None) -> dict[str, Any]:
    """Losses by step and evaluations of a run."""
    run, recorder = make_run((*overrides,), out)
    train(run, resume_from=resume_from)
    return {
        "losses": {event["step"]: event["loss"] for event in recorder.of("step")},
        "evals": {event["window"]: event for event in recorder.of("eval")},
    }


def _keys(folder: Path, kind: str) -> tuple[str, ...]:
    keys, schema = KINDS[kind]
    own = [key for key in ON_A_LOG if not (keys and key.startswith(("head.num_negatives", "eval.metric")))]
    return (*own, *keys, f"data.path={_grow(folder, schema)}")


@pytest.mark.parametrize("kind", ["both", slow("features"), slow("tasks")])
def test_ranks_and_a_resume_do_not_change_the_curve(tmp_path: Path, kind: str) -> None:
    keys = _keys(tmp_path, kind)
    alone = learn(0, keys, str(tmp_path / "one"), None)
    assert sorted(alone["evals"]) == [1, 2]
    two = run_on_ranks(learn, 2, keys, str(tmp_path / "two"), None, timeout=110)[0]
    path = saved_in(tmp_path / "two" / "checkpoints")[0]
    again = learn(0, keys, str(tmp_path / "two"), path)
    for found in (two, again):
        for step, loss in found["losses"].items():
            assert loss == pytest.approx(alone["losses"][step], rel=1e-9)
        for window, event in found["evals"].items():
            for name in ("auc/like", "ndcg@10"):
                if name in alone["evals"][window]:
                    assert event[name] == pytest.approx(alone["evals"][window][name], rel=1e-9)
    assert sorted(two["losses"]) == sorted(alone["losses"])
    assert sorted(again["losses"])[-1] == sorted(alone["losses"])[-1]


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("both", 1), slow("features", 2), slow("tasks", 2), slow("both", 4)]
)
def test_a_chain_with_tables_of_features_is_the_full_export_of_every_checkpoint(
    tmp_path: Path, kind: str, num_ranks: int
) -> None:
    keys = _keys(tmp_path, kind)
    if num_ranks == 1:
        learn(0, keys, str(tmp_path / "run"), None)
    else:
        run_on_ranks(learn, num_ranks, keys, str(tmp_path / "run"), None, timeout=110)
    config = load_config(None, [*SMALL, *keys, f"run.out={tmp_path}/run"])
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml())
    config, run, _ = open_run(tmp_path / "run", device="cpu")
    paths = saved_in(tmp_path / "run" / "checkpoints")
    changed = 0
    for number, path in enumerate(paths):
        # One checkpoint more each time.
        publish_run(_until(tmp_path, number), tmp_path / "chain")
        load_run(run, path)
        full = write_run_export(tmp_path / f"full-{number}", config, run, read_meta(path), tmp_path / "run")
        found, wanted = load_version(tmp_path / "chain")[1], read_version(full)
        assert found.fingerprint == wanted.fingerprint
        changed += len(wanted.tables.keys() - {"item"})  # a ranker has rows of items as a table, too
    assert (changed > 0) == (kind != "tasks")
    served, whole = ChainModel(tmp_path / "chain"), load_export(full)
    asked = _asked(kind, whole.items[:3].tolist(), whole.items[3:6].tolist())
    if kind == "features":
        assert served.recommend(**asked) == whole.recommend(**asked)
    else:
        np.testing.assert_equal(served.score(**asked), whole.score(**asked))


def _until(folder: Path, number: int) -> Path:
    """The run as it was when it had so many checkpoints."""
    place = folder / f"run-{number}"
    (place / "checkpoints").mkdir(parents=True)
    shutil.copy(folder / "run" / "config.yaml", place)
    for path in saved_in(folder / "run" / "checkpoints")[: number + 1]:
        shutil.copytree(path, place / "checkpoints" / path.name)
    return place


def _asked(kind: str, history: list[int], candidates: list[int]) -> dict[str, Any]:
    asked: dict[str, Any] = {"history": history, "times": [1, 2, 3]}
    features = {
        "device": ["phone", "tv", None],
        "shop": [1, 2, 3],
        "price": [1.0, 2.0, None],
        "action": [1, 0, 1],
    }
    if kind != "tasks":
        asked["features"] = features
    if kind == "features":
        return {**asked, "k": 4}
    asked["candidates"] = candidates
    if kind == "both":
        asked["candidate_features"] = {
            "device": ["tv", "tv", "desk"],
            "shop": [4, 5, 6],
            "price": [1.0, 2.0, 3.0],
        }
    return asked
