"""A run that is never evaluated trains, saves its last state, and can be evaluated afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.test_bad_input import freescale, refusal
from tests.small_run import SMALL


def test_zero_means_never(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    freescale("train", *SMALL, f"run.out={tmp_path}", "run.steps=4", "run.eval_every=0")
    said = capsys.readouterr().out
    assert "never evaluated" in said
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "eval" not in {event["event"] for event in events}
    assert events[-1]["event"] == "end"
    assert "best_value" not in events[-1]
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert (tmp_path / "report.html").exists()
    freescale("evaluate", str(tmp_path))
    assert "hr@10" in capsys.readouterr().out


def test_patience_needs_evaluations(tmp_path: Path) -> None:
    assert "run.patience: needs evaluations" in refusal(
        "train", *SMALL, f"run.out={tmp_path}", "run.eval_every=0", "run.patience=3"
    )
