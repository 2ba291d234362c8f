"""What the first edition wrote still opens, goes on and answers the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from freescale import load_export
from freescale.app.run.opened_run import evaluate_run, export_run
from freescale.data import ParquetSource
from freescale.recipe import build_run, build_source, load_config
from freescale.train import Progress, train
from tests.small_run import Recorder, these_ranks

OLD = Path(__file__).parent / "first_edition"


@pytest.fixture
def run_dir(tmp_path):
    """A copy of the old run, which finds its data where it is now."""
    folder = tmp_path / "run"
    shutil.copytree(OLD / "run", folder)
    recipe = folder / "config.yaml"
    recipe.write_text(recipe.read_text().replace("path: dataset", f"path: {OLD / 'dataset'}"))
    return folder


def test_its_data_set_opens():
    source = ParquetSource(OLD / "dataset")
    assert len(source.lengths) == 40
    assert len(source.items.ids) == 59


def test_its_run_is_evaluated_to_the_same_numbers(run_dir):
    """But for two of the forty targets, which have no row of their own: hits then, nothing an export could give now."""
    was = json.loads((OLD / "evaluate.json").read_text())
    now = evaluate_run(run_dir, device="cpu")
    assert now["protocol"].startswith(was["protocol"])
    assert now["popularity"] == pytest.approx(was["popularity"], rel=1e-6)
    source, exported = ParquetSource(OLD / "dataset"), load_export(OLD / "export").items
    histories = source.read(np.arange(len(source.lengths)))
    targets = histories.columns["item"][histories.offsets[1:] - 1]
    missed = float(np.mean(~np.isin(targets, exported)))
    assert missed == 2 / 40
    for cutoff in ("hr@10", "hr@50", "hr@200"):
        assert now["metrics"][cutoff] == pytest.approx(was["metrics"][cutoff] - missed)


def test_its_run_goes_on_from_a_checkpoint_on_the_same_curve(run_dir):
    lines = [json.loads(line) for line in (OLD / "run" / "metrics.jsonl").read_text().splitlines()]
    was = {line["step"]: line["loss"] for line in lines if line["event"] == "step"}
    config = load_config(run_dir / "config.yaml", [f"run.out={run_dir}"])
    recorder = Recorder()
    run = build_run(config, build_source(config), these_ranks(), Progress([recorder]))
    train(run, resume_from=run_dir / "checkpoints" / "step-00000003")
    now = {event["step"]: event["loss"] for event in recorder.of("step")}
    assert sorted(now) == [4, 5, 6]
    assert now == pytest.approx({step: was[step] for step in now}, rel=1e-5)


def test_its_export_recommends_the_same_items(run_dir, tmp_path):
    again = load_export(export_run(run_dir, tmp_path / "again"))
    for model in (load_export(OLD / "export"), again):
        for asked in json.loads((OLD / "recommend.json").read_text()):
            answer = model.recommend(asked["history"], times=asked["times"], k=5)
            assert [item for item, _ in answer] == [item for item, _ in asked["answer"]]
            assert [s for _, s in answer] == pytest.approx([s for _, s in asked["answer"]], abs=1e-5)
