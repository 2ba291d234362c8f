"""benchmarks/virtual_gpus.py names a run when it begins, and prints and saves it while others go on."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def virtual_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import virtual_gpus

    yield virtual_gpus
    for name in ("virtual_gpus", "one_training"):
        sys.modules.pop(name, None)


def whole_lines(file: Path) -> str:
    """What stands in a file that another thread writes, or nothing: a file exists before its first line does."""
    text = file.read_text() if file.exists() else ""
    return text if text.endswith("\n") else ""


def test_a_run_is_saved_before_the_next_is_through(
    virtual_gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "rows.jsonl"
    row = {
        "step_ms": 2.0,
        "seconds": 1.0,
        "losses": [1.0],
        **dict.fromkeys(("bubble", *virtual_gpus.CAUSES), 0.1),
    }
    seen: list[str] = []

    def train_in_turn(recipes: Any, *, folder: Path, **options: Any) -> dict[int, Path | str]:
        (folder / "0.begins").write_text("yes")
        (folder / "0").mkdir()
        (folder / "0" / "trained").write_text("1.0")
        deadline = time.monotonic() + 30
        while not (text := whole_lines(saved)) and time.monotonic() < deadline:
            time.sleep(0.01)
        (folder / "1.begins").write_text("yes")
        seen.append(text)
        return {0: folder / "0", 1: "ranks [0] did not exchange rows within 90 s"}

    monkeypatch.setattr(virtual_gpus, "LOOK_S", 0.01)
    monkeypatch.setattr(virtual_gpus, "train_in_turn", train_in_turn)
    monkeypatch.setattr(virtual_gpus, "read_run", lambda folder, options: dict(row))
    options = argparse.Namespace(only="", 
        save=str(saved), keep=None, device="cpu", time_sliced=False, budget_s=9.0, rounds=1, steps=1, keys=[],
        named=True, brief=False, transports=["collective", "host_staged"],
    )  # fmt: skip
    rows = virtual_gpus.measure(2, options)
    first = virtual_gpus.named_settings(options.transports)[0].name
    assert json.loads(seen[0])["setting"] == first
    assert [each.get("problem", "") for each in rows] == ["", "ranks [0] did not exchange rows within 90 s"]
    assert len(saved.read_text().splitlines()) == 2
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("begins")
    assert out[1].startswith(f"round 1  {first}")
    assert "2.0 ms" in out[1]
    assert out[2].endswith("begins")
