"""Runs that start from tables of a TorchRec checkpoint, as a user would: import, train, resume elsewhere, export."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from freescale.app.cli import app
from freescale.app.run.opened_run import open_run
from freescale.app.run.torchrec_tables import export_torchrec, import_torchrec
from freescale.app.run.train_run import train_run
from freescale.bridge.dcp_files import load_tensors, save_tensors, tensors_in
from freescale.errors import ConfigError
from freescale.recipe import build_run, build_source, load_config, start_tables
from freescale.train import Progress, train
from tests.ranks import run_on_ranks
from tests.small_run import SMALL, Recorder, these_ranks

NUM, DIM = 160, 12
WEIGHT = "ec.embeddings.item.weight"
COMMON = (*SMALL, "embedding.optimizer=rowwise_adagrad", f"model.dim={DIM}", "run.checkpoint_every=2")
BY_NUMBER = (*COMMON, f"embedding.rows={NUM}")
OWNED = (*COMMON, "embedding.id_map=zero_collision", "embedding.rows=640", "embedding.buckets=2")


@pytest.fixture
def theirs(tmp_path):
    """A checkpoint with a table whose row is the id."""
    drawn = torch.Generator().manual_seed(1)
    tensors = {
        f"model.{WEIGHT}": torch.randn(NUM, DIM, generator=drawn),
        f"optim.state.{WEIGHT}.item.momentum1": torch.rand(NUM, generator=drawn),
    }
    save_tensors(tmp_path / "theirs", tensors)
    return tmp_path / "theirs"


def in_folder(folder):
    found = {
        name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in tensors_in(folder).items()
    }
    load_tensors(folder, found)
    return found


def trained(rank, out, *overrides, steps):
    config = load_config(None, [*overrides, f"run.out={out}", f"run.steps={steps}", "run.eval_every=0"])
    told = Recorder()
    train_run(config, resume="auto", open_terminal=lambda total: told)
    return [event["loss"] for event in told.of("step")], [event["text"] for event in told.of("notice")]


def test_rows_and_sums_go_in_and_out_bit_for_bit(theirs, tmp_path):
    lines = import_torchrec(theirs, tmp_path / "rows")
    assert lines == [
        "item: 160 of 160 rows, width 12, with the sums of row-wise Adagrad; a row is the id",
    ]
    start = f"embedding.start_from={tmp_path / 'rows'}"
    _, told = trained(0, tmp_path / "run", *BY_NUMBER, start, "embedding.lr=0", steps=1)
    assert any("starts with 160 rows from elsewhere and their state" in text for text in told)
    export_torchrec(tmp_path / "run", tmp_path / "back")
    back, before = in_folder(tmp_path / "back"), in_folder(theirs)
    assert back.keys() == before.keys()
    assert torch.equal(back[f"model.{WEIGHT}"], before[f"model.{WEIGHT}"])
    sums = f"optim.state.{WEIGHT}.item.momentum1"
    grown = back[sums] > before[sums]  # by the gradients of the one step, of rate 0
    assert 0 < int(grown.sum()) < NUM
    assert torch.equal(back[sums][~grown], before[sums][~grown])


def test_a_run_that_started_from_them_goes_on_on_another_number_of_ranks(theirs, tmp_path):
    import_torchrec(theirs, tmp_path / "rows")
    recipe = (*OWNED, f"embedding.start_from={tmp_path / 'rows'}", "model.dtype=float64", "run.eval_every=0")
    whole = steps(0, tmp_path / "whole", recipe, 4)
    first = run_on_ranks(steps, 2, tmp_path / "apart", recipe, 2)[0]
    rest = run_on_ranks(steps, 3, tmp_path / "apart", recipe, 4, 2)[0]
    assert first + rest == pytest.approx(whole, abs=1e-9)
    fresh = steps(0, tmp_path / "fresh", (*OWNED, "model.dtype=float64", "run.eval_every=0"), 1)
    assert abs(fresh[0] - whole[0]) > 1e-3


def steps(rank, out, recipe, upto, after=None):
    """Losses up to a step, from the beginning or from a checkpoint, on these ranks."""
    config = load_config(None, [*recipe, f"run.out={out}", f"run.steps={upto}"])
    told = Recorder()
    run = build_run(config, build_source(config), these_ranks(), Progress([told]))
    if after is None:
        start_tables(config, run)
    train(run, resume_from=None if after is None else out / "checkpoints" / f"step-{after:08d}")
    return [event["loss"] for event in told.of("step")]


def test_only_named_tables_are_exported_and_what_is_missing_is_said(theirs, tmp_path):
    import_torchrec(theirs, tmp_path / "rows", tables={"user": WEIGHT}, state=False)
    facts = json.loads((tmp_path / "rows" / "tables.json").read_text())
    assert facts["tables"]["user"]["names"]["momentum"] is None
    start = f"embedding.start_from={tmp_path / 'rows'}"
    _, told = trained(0, tmp_path / "run", *BY_NUMBER, start, steps=1)
    assert any("table item has no rows in" in text for text in told)
    with pytest.raises(ConfigError, match="what the tables are called"):
        export_torchrec(tmp_path / "run", tmp_path / "back")
    with pytest.raises(ConfigError, match="no such table"):
        export_torchrec(tmp_path / "run", tmp_path / "back", names={"items": WEIGHT})
    export_torchrec(tmp_path / "run", tmp_path / "back", names={"item": WEIGHT})
    _, run, _ = open_run(tmp_path / "run", device="cpu")
    table = run.state.embedding.tables["item"]
    rows = run.state.id_maps["item"].rows(torch.arange(NUM))
    assert torch.equal(in_folder(tmp_path / "back")[f"model.{WEIGHT}"], table.weight[rows])


def test_another_optimizer_is_refused(theirs, tmp_path):
    import_torchrec(theirs, tmp_path / "rows")
    start = f"embedding.start_from={tmp_path / 'rows'}"
    with pytest.raises(
        ConfigError, match=r"sums of row-wise Adagrad(.|\n)*embedding.optimizer=rowwise_adagrad"
    ):
        trained(0, tmp_path / "run", *BY_NUMBER, start, "embedding.optimizer=adam", steps=1)


def test_the_command_imports_and_says_what_comes_next(theirs, tmp_path):
    told = CliRunner().invoke(app, ["import", "torchrec", str(theirs), str(tmp_path / "rows")])
    assert told.exit_code == 0, told.output
    assert "160 of 160 rows" in told.output
    assert "embedding.start_from=" in told.output
    with pytest.raises(ConfigError, match="from TorchRec only"):
        CliRunner().invoke(app, ["import", "keras", "a", "b"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        CliRunner().invoke(app, ["import", "torchrec", "a", "b", "--table", "x"], catch_exceptions=False)
