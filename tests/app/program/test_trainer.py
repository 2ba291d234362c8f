"""Trainer: the same steps as the command, from a program; what it refuses, marks and keeps."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from freescale import Table, Trainer, load_export
from freescale.app.program.trainer import _Silent
from freescale.app.run.train_run import train_run
from freescale.data import ListedHistories
from freescale.errors import CheckpointError, ConfigError, DataError, TrainingError
from freescale.model import HSTU, RetrievalHead
from freescale.recipe import load_config
from freescale.train import TrainStep
from tests.check import planted
from tests.small_run import SMALL, Recorder

SHORT = {
    "data.max_length": 8,
    "data.global_batch": 8,
    "head.num_negatives": 3,
    "run.device": "cpu",
    "run.steps": 6,
    "run.eval_every": 2,
    "run.log_every": 1,
}


def make(folder, **options):
    recipe = {**SHORT, "run.out": str(folder), **options.pop("recipe", {})}
    given = {
        "encoder": planted.Gru(),
        "tables": [Table("item", dim=planted.DIM)],
        "source": planted.HISTORIES,
        **options,
    }
    return Trainer(recipe=recipe, **given)


def events(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def test_the_losses_of_the_command_bit_for_bit(tmp_path, monkeypatch):
    recipe = [*SMALL, "run.steps=12", "run.eval_every=6", "model.dropout=0.2"]
    config = load_config(None, [*recipe, f"run.out={tmp_path / 'command'}"])
    steps = []
    step = TrainStep.run
    monkeypatch.setattr(TrainStep, "run", lambda self, *given: steps.append(1) or step(self, *given))
    train_run(config, resume="auto", open_terminal=lambda total: _Silent())
    flat = dict(word.split("=") for word in recipe)
    flat = {
        key: int(x) if x.isdigit() else float(x) if x.replace(".", "").isdigit() else x
        for key, x in flat.items()
    }
    described = {key: flat.pop(key) for key in ("model.layers", "model.dropout")}

    def same_as_the_recipe():
        return HSTU(
            dim=12,
            layers=described["model.layers"],
            max_length=40,
            dropout=described["model.dropout"],
            time_bias=True,
        )

    named = Trainer(encoder="hstu", recipe={**flat, **described, "run.out": str(tmp_path / "named")})
    made = Trainer(
        encoder=same_as_the_recipe, head=RetrievalHead(), recipe={**flat, "run.out": str(tmp_path / "made")}
    )
    named.fit(quiet=True)
    made.fit(quiet=True)
    wanted = [event["loss"] for event in events(tmp_path / "command", "step")]
    assert len(wanted) == 12
    assert len(steps) == 36, "all three take the one step function"
    for way in ("named", "made"):
        assert [event["loss"] for event in events(tmp_path / way, "step")] == wanted


def test_a_program_that_runs_again_goes_on_and_changes_no_object(tmp_path):
    encoder = planted.Gru()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    make(tmp_path / "whole", encoder=encoder).fit(quiet=True)
    cut = {"run.steps": 4}
    make(tmp_path / "cut", encoder=encoder, recipe=cut).fit(quiet=True)
    summary = make(tmp_path / "cut", encoder=encoder).fit(quiet=True)
    assert summary["steps"] == 6
    losses = [[event["loss"] for event in events(tmp_path / way, "step")] for way in ("whole", "cut")]
    assert losses[0] == losses[1]
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_run_check_warn_trains_on_and_marks_run_report_and_export(tmp_path):
    trainer = make(tmp_path / "run", head=planted.MeanLoss(), recipe={"run.check": "warn"})
    trainer.fit(quiet=True)
    start = events(tmp_path / "run", "start")[0]
    assert start["facts"]["run"]["one curve"].startswith("NOT on the one curve")
    notices = [event["text"] for event in events(tmp_path / "run", "notice")]
    assert any("NOT on the one curve: the loss is a sum: your loss is a mean" in text for text in notices)
    assert "NOT on the one curve" in (tmp_path / "run" / "report.html").read_text()
    folder = trainer.export(tmp_path / "export")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["own_code"]["on_the_one_curve"] is False
    assert "mean over targets" in manifest["own_code"]["violations"][0]
    with pytest.raises(ConfigError, match="mean over targets"):
        make(tmp_path / "run", head=planted.MeanLoss()).fit(quiet=True)


def test_another_source_of_the_class_is_said_on_resume_and_not_refused(tmp_path):
    make(tmp_path / "run", recipe={"run.steps": 2}).fit(quiet=True)
    path = tmp_path / "run" / "own_code.json"
    kept = json.loads(path.read_text())
    assert kept["encoder"]["class"] == "tests.check.planted.Gru"
    kept["encoder"]["source"] = "0" * 16
    path.write_text(json.dumps(kept))
    make(tmp_path / "run").fit(quiet=True)
    notices = [event["text"] for event in events(tmp_path / "run", "notice")]
    assert any("the source of encoder python:Gru is not what it was" in text for text in notices)


def test_an_export_of_an_object_wants_one_of_its_class(tmp_path):
    trainer = make(tmp_path / "run")
    trainer.fit(quiet=True)
    folder = trainer.export(tmp_path / "export")
    with pytest.raises(CheckpointError, match=r"load_export\(path, encoder=Gru\(\.\.\.\)\)"):
        load_export(folder)
    with pytest.raises(CheckpointError, match="of class Gru, got a UnusedWeights"):
        load_export(folder, encoder=planted.UnusedWeights())
    assert len(load_export(folder, encoder=planted.Gru()).recommend([3, 0], k=2)) == 2
    with pytest.raises(ConfigError, match=r"model\.kind: got 'python:Gru'; an object of a program"):
        load_config(tmp_path / "run" / "config.yaml")


class StopAtStepFour:
    """Stops by what it has seen: only a judge that hears of earlier evaluations again decides alike."""

    def __init__(self):
        self.seen = []

    def decide(self, event):
        self.seen.append(event["step"])
        return "seen enough" if self.seen == [2, 4] else None


def test_a_judge_ends_the_run_also_after_a_resume(tmp_path):
    judge = StopAtStepFour()
    assert make(tmp_path / "whole", judge=judge).fit(quiet=True)["steps"] == 4
    assert judge.seen == [2, 4]
    assert any(
        "the judge ends the run: seen enough" in e["text"] for e in events(tmp_path / "whole", "notice")
    )
    make(tmp_path / "cut", judge=StopAtStepFour(), recipe={"run.steps": 2}).fit(quiet=True)
    resumed = StopAtStepFour()
    assert make(tmp_path / "cut", judge=resumed).fit(quiet=True)["steps"] == 4
    assert resumed.seen == [2, 4]


class Fails:
    def __init__(self):
        self.written = 0

    def write(self, event):
        self.written += 1
        event.clear()
        if event.get("event") is None and self.written == 3:
            raise OSError("no network")

    def close(self):
        pass


def test_sinks_get_copies_and_one_that_fails_is_told_once(tmp_path):
    good, bad = Recorder(), Fails()
    make(tmp_path / "run", sinks=[bad, good]).fit(quiet=True)
    assert bad.written == 3
    assert len(good.of("step")) == 6
    told = [event["text"] for event in good.of("notice") if "Fails failed" in event["text"]]
    assert told == ["the sink Fails failed and gets no more events: OSError: no network"]


def test_histories_in_lists(tmp_path):
    source = ListedHistories({7: [5, 3, 5, 9], 2: [3, 3], 4: []})
    assert source.lengths.tolist() == [4, 2, 0]
    assert source.items.ids.tolist() == [3, 5, 9]
    assert source.items.counts.tolist() == [3, 2, 1]
    assert source.items.train_counts.tolist() == [1, 1, 0]
    read = source.read([1, 0])
    assert read.users.tolist() == [2, 7]
    assert read.offsets.tolist() == [0, 2, 6]
    assert read.columns["item"].tolist() == [3, 3, 5, 3, 5, 9]
    timed = ListedHistories([{"item": [1, 2, 3, 4], "time": [1, 2, 3, 4]}])
    assert timed.features == ("item", "time")
    with pytest.raises(DataError, match=r"(?s)whole numbers.*ids may be of any kind: `freescale prepare`"):
        ListedHistories([["a", "b"]])
    with pytest.raises(DataError, match="same length"):
        ListedHistories([{"item": [1, 2], "time": [1]}])
    assert make(tmp_path / "run", source=ListedHistories(planted.HISTORIES)).check().ok


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"encoder": planted.Gru}, r"encoder= takes an object, not a class(.|\n)*encoder=Gru\(\.\.\.\)"),
        ({"encoder": "hstuu"}, "did you mean hstu"),
        ({"tables": [Table("item"), Table("item")]}, "given twice"),
        ({"tables": [Table("item", maps="hash")]}, r"embedding\.maps: unknown key"),
        ({"recipe": {"model.dim": 5}}, r"model\.dim: the recipe says one thing(.|\n)*5 and 6"),
        ({"recipe": {"model.layers": 3}}, r"model\.layers: says nothing to an object"),
        ({"head": planted.MeanLoss(), "recipe": {"head.temperature": 1}}, r"head\.temperature: says nothing"),
        ({"recipe": {"run.step": 3}}, r"run\.step: unknown key; did you mean run\.steps"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        make(tmp_path / "run", **options)


def test_a_table_in_the_words_of_the_schema(tmp_path):
    table = Table("item", dim=planted.DIM, map="zero_collision", rows=80, optimizer="sgd", lr=0.5)
    config = make(tmp_path / "run", tables=[table]).config
    assert (config.embedding.id_map, config.embedding.rows, config.model.dim) == ("zero_collision", 80, 6)
    assert (config.embedding.optimizer, config.embedding.lr) == ("sgd", 0.5)


def test_a_function_makes_other_weights_for_another_seed(tmp_path):
    def first_loss(seed, folder):
        make(folder, encoder=lambda: planted.Gru(), recipe={"run.seed": seed, "run.steps": 2}).fit(quiet=True)
        return events(folder, "step")[0]["loss"]

    one, same, other = (first_loss(seed, tmp_path / f"{n}") for n, seed in enumerate((1, 1, 2)))
    assert one == same != other
    assert np.isfinite(other)


def test_a_program_that_runs_again_exports_again_and_nothing_changes(tmp_path):
    """The script of docs/own_models.md, run twice, ended with an error."""
    make(tmp_path / "run").fit(quiet=True)
    folder = make(tmp_path / "run").export(tmp_path / "export")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert make(tmp_path / "run").export(folder) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "run"]
    other = make(tmp_path / "other", recipe={"run.seed": 2})
    other.fit(quiet=True)
    with pytest.raises(DataError, match="something else than this export"):
        other.export(folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_other_ranks_wait_until_rank_0_has_exported(tmp_path, monkeypatch):
    """`load_export(trainer.export(...))` under torchrun: rank 1 looked before there was anything to see."""
    make(tmp_path / "run").fit(quiet=True)
    monkeypatch.setenv("RANK", "1")
    other = make(tmp_path / "run", recipe={"comm.timeout_s": 30})
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(other.export, tmp_path / "export")
        time.sleep(0.2)
        assert not waits.done()
        monkeypatch.setenv("RANK", "0")
        make(tmp_path / "run").export(tmp_path / "export")
        assert load_export(waits.result(timeout=60), encoder=planted.Gru()).recommend([3, 0], k=1)
    monkeypatch.setenv("RANK", "1")
    hasty = make(tmp_path / "run", recipe={"comm.timeout_s": 1})
    with pytest.raises(TrainingError, match="rank 0 has not exported"):
        hasty.export(tmp_path / "nowhere")
