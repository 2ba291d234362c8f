"""What the first window of a log has decided stays decided when it is dropped: train, export and publish go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from freescale.app.run.opened_run import evaluate_run, export_run
from freescale.app.run.train_run import train_run
from freescale.app.serving.publishing import publish_run
from freescale.data import drop_windows
from freescale.errors import ConfigError
from freescale.recipe import load_config
from freescale.trace import read_metrics
from tests.grown_log import ON_A_LOG, grow
from tests.small_run import SMALL, Recorder


def learn(folder: Path, *keys: str, resume: str = "auto") -> Recorder:
    """`freescale train` over the log in a folder."""
    told = Recorder()
    recipe = [*SMALL, *ON_A_LOG, f"data.path={folder}/log", f"run.out={folder}/run", *keys]
    train_run(load_config(None, recipe), resume=resume, open_terminal=lambda total: told)
    return told


def evaluation_of(export: Path) -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads((export / "manifest.json").read_text())["evaluation"]
    return found


def seen_items(told: Recorder) -> str:
    """What the summary of a run says of them."""
    return str(told.of("start")[0]["facts"]["evaluation"]["seen items"])


def test_a_run_goes_on_with_what_the_first_window_decided_after_that_was_dropped(tmp_path: Path) -> None:
    grow(tmp_path, 0, 2)
    learn(tmp_path)
    before = evaluation_of(export_run(tmp_path / "run", tmp_path / "before"))
    assert publish_run(tmp_path / "run", tmp_path / "chain") == 2
    drop_windows(tmp_path / "log", before=1)
    after = export_run(tmp_path / "run", tmp_path / "after")
    assert evaluation_of(after) == before
    assert "repeat_share" in before
    assert (after / "model.safetensors").read_bytes() == (tmp_path / "before/model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="a run over a log has no test targets"):
        evaluate_run(tmp_path / "run")
    grow(tmp_path, 2, 3)
    assert "eval.filter_seen=auto; the first window is deleted" in seen_items(learn(tmp_path))
    evals = read_metrics(tmp_path / "run" / "metrics.jsonl").evals
    assert [event["window"] for event in evals] == [1, 2]
    assert {event["filter_seen"] for event in evals} == {before["filter_seen"]}
    assert len({event["repeat_share"] for event in evals}) == 1
    assert publish_run(tmp_path / "run", tmp_path / "chain") == 1
    grow(tmp_path, 3, 4)
    learn(tmp_path, f"run.out={tmp_path}/other", resume=str(tmp_path / "run"))
    assert evaluation_of(export_run(tmp_path / "other", tmp_path / "out")) == before


def test_a_new_run_on_such_a_log_is_told_what_works(tmp_path: Path) -> None:
    grow(tmp_path, 0, 2)
    learn(tmp_path)
    drop_windows(tmp_path / "log", before=1)
    with pytest.raises(ConfigError, match=r"(?s)eval.filter_seen: auto .*--resume RUN_DIR.*new log"):
        learn(tmp_path, f"run.out={tmp_path}/new")
