"""A run whose best checkpoint was damaged is evaluated and exported by another one, and that is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freescale.train.state.saved import read_meta
from tests.end_to_end.test_other_input import call
from tests.small_run import SMALL
from tests.train.state.test_checkpoint import damage, shard_of


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_the_newest_that_is_whole_is_taken_and_said(command: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    keys = ("run.steps=6", "run.eval_every=2", "run.keep=5", f"run.out={out}")
    assert call("train", *SMALL, *keys)[0] == 0
    saved = [out / "checkpoints" / f"step-0000000{step}" for step in (2, 4, 6)]
    (out / "checkpoints" / "best.json").write_text(json.dumps({"step": 2, "metric": "ndcg@10", "value": 1.0}))
    damage(shard_of(saved[0]))
    words = [command, out, *([tmp_path / "export"] if command == "export" else [])]
    code, said = call(*words)
    assert code == 0, said
    assert "step-00000006 is taken instead, which is not the best" in said
    if command == "export":
        manifest = json.loads((tmp_path / "export" / "manifest.json").read_text())
        assert read_meta(saved[2])["step"] == manifest["trained_steps"] == 6
    for other in saved[1:]:
        damage(shard_of(other))
    words[-1] = words[-1] if command == "evaluate" else tmp_path / "again"
    code, said = call(*words)
    assert code != 0
    assert "all 3 checkpoints of the run are damaged" in said
    assert "step-00000002 is damaged" in said
    assert "--resume never" in said
