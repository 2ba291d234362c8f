"""What is found out while a run is built reaches those who started it: sinks are opened only afterwards."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from freescale.app.cli import app
from tests.small_run import SMALL


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("pipeline.postpone=on", "weight gradients in the plain order, not postponed: no embedding traffic"),
        ("comm.dedup=node", "comm.dedup=node changes nothing on one rank"),
        ("comm.sums=local", "comm.sums=local changes nothing on one rank"),
    ],
)
def test_what_is_switched_off_is_said_on_the_terminal_and_in_the_log(key: str, text: str, tmp_path: Path):
    out = tmp_path / "run"
    keys = [*SMALL, "run.steps=2", "run.eval_every=0", "run.device=cpu", f"run.out={out}", key]
    done = CliRunner().invoke(app, ["train", *keys], catch_exceptions=False)
    events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert [event["text"] for event in events if event["event"] == "notice" and text in event["text"]]
    assert text in " ".join(done.output.split())
