"""One data set for a run: other data on a rank are refused before the first step, and other data on resuming."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.app.run.train_run import train_run
from freescale.errors import DataError
from freescale.recipe import load_config
from tests.item_files import write_made_up_texts
from tests.prepared_data import CHANGES, made_up, write_dataset
from tests.ranks import run_on_ranks
from tests.small_run import SMALL, Recorder, make_run

KEYS = ("data.path=wiki", "data.global_batch=12")


def build_on_own_data(rank: int, folder: str, keys: tuple[str, ...]) -> str:
    """As on two machines: one relative path, a folder each."""
    os.chdir(f"{folder}/{rank}")
    with pytest.raises(DataError) as refused:
        make_run((*KEYS, *keys), f"{folder}/run")
    return str(refused.value)


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_on_one_rank_are_refused_before_the_first_step(tmp_path: Path, change: str) -> None:
    changed, told = CHANGES[change]
    write_dataset(tmp_path / "0" / "wiki", made_up())
    write_dataset(tmp_path / "1" / "wiki", changed(made_up()))
    messages = run_on_ranks(build_on_own_data, 2, str(tmp_path), ())
    assert messages[0] == messages[1], "told on every rank alike"
    assert messages[0].startswith(f"rank 1 on {os.uname().nodename} has other data than rank 0 on")
    assert re.search(told, messages[0])


@pytest.mark.parametrize("kind", ["content", "text"])
def test_other_content_of_items_on_one_rank_is_refused(tmp_path: Path, kind: str) -> None:
    num_items = len({item for history in made_up() for item in history})
    for rank in range(2):
        folder = write_dataset(tmp_path / str(rank) / "wiki", made_up())
        np.save(folder / "content.npy", np.full((num_items, 3), rank, np.float32))
        write_made_up_texts(folder / "texts.parquet", 49, seed=rank)
    messages = run_on_ranks(build_on_own_data, 2, str(tmp_path), (f"items.kind={kind}",))
    assert "the content vectors or texts of the items" in messages[0]


def go(folder: Path, data: Path, *keys: str, new_data: bool = False) -> list[dict[str, Any]]:
    config = load_config(
        None, [*SMALL, "data.global_batch=12", f"data.path={data}", f"run.out={folder}", *keys]
    )
    terminal = Recorder()
    train_run(config, resume="auto", open_terminal=lambda total: terminal, new_data=new_data)
    return terminal.events


@pytest.mark.parametrize("change", CHANGES)
def test_resuming_on_other_data_is_refused_by_name_and_nothing_is_touched(
    tmp_path: Path, change: str
) -> None:
    changed, told = CHANGES[change]
    data, other = (
        write_dataset(tmp_path / "wiki", made_up()),
        write_dataset(tmp_path / "b", changed(made_up())),
    )
    run = tmp_path / "run"
    go(run, data, "run.steps=2", "model.dim=8")
    kept = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    with pytest.raises(DataError, match=f"(?s)step-00000002 has learnt from other data: wiki.*{told}"):
        go(run, other, "run.steps=4", "model.dim=8")
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == kept


def test_a_moved_data_set_is_the_same_and_a_new_one_may_be_asked_for(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "wiki", made_up())
    other = write_dataset(tmp_path / "b", CHANGES["items"][0](made_up()))
    run = tmp_path / "run"
    go(run, data, "run.steps=2")
    shutil.move(data, tmp_path / "moved")
    moved = go(run, tmp_path / "moved", "run.steps=4")[0]
    assert moved["event"] == "resume"
    assert "data.path" in moved["message"]
    assert "other data" not in moved["message"]
    new = go(run, other, "run.steps=6", new_data=True)[0]["message"]
    assert "now" in new
    assert "other data: what is in shard-00000.parquet" in new
    # From now on these are its data.
    go(run, other, "run.steps=8")
    metas = [json.loads((path / "meta.json").read_text()) for path in sorted(run.glob("checkpoints/step-*"))]
    assert [meta["step"] for meta in metas][-1] == 8
    assert metas[-1]["data"]["name"] == "b"
