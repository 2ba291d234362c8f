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
        ("ffn.hidden=512", "ffn.hidden changes nothing with ffn.kind=none"),
        ("data.passes=5", "data.passes changes nothing where data.path is no log"),
        ("tokens.join=mlp", "tokens.join changes nothing where there are no features"),
        (
            "model.kind=sasrec model.position_bias=false",
            "model.position_bias changes nothing with encoder sasrec",
        ),
        ("head.label_thresholds=[2]", "head.label_thresholds changes nothing with head retrieval"),
        ("embedding.optimizer=sgd embedding.beta2=0.5", "embedding.beta2 changes nothing with optimizer sgd"),
        ("embedding.optimizer=sgd embedding.eps=0.5", "embedding.eps changes nothing with optimizer sgd"),
    ],
)
def test_what_is_switched_off_is_said_on_the_terminal_and_in_the_log(key: str, text: str, tmp_path: Path):
    out = tmp_path / "run"
    keys = [*SMALL, "run.steps=2", "run.eval_every=0", "run.device=cpu", f"run.out={out}", *key.split()]
    done = CliRunner().invoke(app, ["train", *keys], catch_exceptions=False)
    events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert [event["text"] for event in events if event["event"] == "notice" and text in event["text"]]
    assert text in " ".join(done.output.split())


def test_nothing_is_said_of_keys_that_do_something(tmp_path: Path):
    """Neither of those of the embedded data, nor of a table of its own that may use what others have no use for."""
    keys = [
        *(*SMALL, "run.steps=1", "run.eval_every=0", "run.device=cpu", f"run.out={tmp_path}"),
        *("embedding.optimizer=rowwise_adagrad", "embedding.eps=1e-6", "ffn.kind=dense", "ffn.hidden=8"),
        *("synthetic.features=true", "tokens.join=mlp", "model.time_bias=false", "head.temperature=0.1"),
    ]
    done = CliRunner().invoke(app, ["train", *keys], catch_exceptions=False)
    assert done.exit_code == 0
    assert "changes nothing" not in done.output


def test_keys_of_the_embedded_data_are_told_beside_other_data(tmp_path: Path):
    raw = tmp_path / "raw.csv"
    lines = [f"{user},{event + user},{event}" for user in range(30) for event in range(5)]
    raw.write_text("user,item,time\n" + "\n".join(lines) + "\n")
    keys = [
        "synthetic.users=100",
        "run.steps=1",
        "run.device=cpu",
        f"data.path={raw}",
        f"run.out={tmp_path / 'run'}",
    ]
    done = CliRunner().invoke(app, ["train", *keys], catch_exceptions=False)
    assert f"synthetic.users changes nothing where data.path is {raw}" in " ".join(done.output.split())
