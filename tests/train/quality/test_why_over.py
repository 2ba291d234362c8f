"""A run that ends before its last step says why: in a note, in its end event, and when it is asked again."""

from __future__ import annotations

import pytest

from freescale.train.loop import train
from tests.small_run import make_run


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("run.patience=1", "nothing better in one evaluation (run.patience=1); best: "),
        ("run.stop_at=0.0001", "run.stop_at=0.0001 is reached: "),
    ],
)
def test_a_run_that_ends_early_says_why(tmp_path, key, why):
    keys = ["run.steps=60", "run.eval_every=1", "optim.lr=1.0", "model.dtype=float32", key]
    run, recorder = make_run(keys, tmp_path)
    summary = train(run)
    assert summary["steps"] < 60
    assert summary["ended"].startswith(why)
    assert "ndcg@10" in summary["ended"]
    (note,) = [event["text"] for event in recorder.of("notice") if event["text"].startswith(why)]
    assert note == summary["ended"]


def test_a_run_that_takes_all_its_steps_says_nothing_of_it(tmp_path):
    run, _ = make_run(["run.steps=4", "run.eval_every=2", "run.patience=50"], tmp_path)
    assert "ended" not in train(run)
