"""A chain holds versions of one run: another one, or no run at all, is refused before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from freescale.app.cli import app
from freescale.app.run.train_run import train_run
from freescale.app.serving import publishing
from freescale.app.serving.publishing import compact_chain, publish_run
from freescale.errors import CheckpointError
from freescale.recipe import load_config
from freescale.train import read_meta, saved_in
from tests.grown_log import ON_A_LOG, grow
from tests.small_run import SMALL, Recorder


def learn(folder: Path, name: str, *keys: str, resume: str = "auto") -> Path:
    recipe = [*SMALL, *ON_A_LOG, "run.eval_every=0", f"data.path={folder}/log", f"run.out={folder}/{name}"]
    train_run(load_config(None, [*recipe, *keys]), resume=resume, open_terminal=lambda total: Recorder())
    return folder / name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run over two windows, and two of another seed: one longer, one shorter."""
    folder = tmp_path_factory.mktemp("trained")
    grow(folder, 0, 2)
    run = learn(folder, "run")
    learn(folder, "short", "run.seed=7", "run.steps=3")
    learn(folder, "again", "run.steps=3")
    publish_run(run, folder / "chain")
    grow(folder, 2, 3)
    learn(folder, "long", "run.seed=7")
    return folder


@pytest.fixture
def never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that would wait for checkpoints fails instead."""
    monkeypatch.setattr(publishing.time, "sleep", lambda seconds: pytest.fail("it waits"))


@pytest.mark.parametrize("options", [[], ["--follow"]])
@pytest.mark.parametrize("chain", ["chain", "new"])
def test_what_is_no_run_folder_is_refused(
    trained: Path, chain: str, options: list[str], never_waits: None
) -> None:
    words = ["publish", str(trained / "tpyo"), str(trained / chain), *options]
    with pytest.raises(CheckpointError, match=r"this is not a run folder: it has no config\.yaml"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert not (trained / "new").exists()
    assert not (trained / "tpyo").exists()


@pytest.mark.parametrize("name", ["short", "long"])
@pytest.mark.parametrize("follow", [False, True])
def test_another_run_is_refused_and_both_are_named(
    trained: Path, name: str, follow: bool, never_waits: None
) -> None:
    before = (trained / "chain" / "current.json").read_bytes()
    with pytest.raises(CheckpointError, match="was published from another run") as caught:
        publish_run(trained / name, trained / "chain", follow=follow)
    said = str(caught.value)
    assert str(trained / name) in said
    assert str(trained / "run") in said
    assert "new folder" in said
    assert (trained / "chain" / "current.json").read_bytes() == before


def test_a_run_publishes_on_from_wherever_it_is(trained: Path, tmp_path: Path) -> None:
    chain, moved = tmp_path / "chain", tmp_path / "moved"
    shutil.copytree(trained / "chain", chain)
    assert publish_run(learn(trained, "again"), chain) == 1  # the same curve, trained anew
    shutil.rmtree(chain)
    shutil.copytree(trained / "chain", chain)
    compact_chain(chain)
    shutil.copytree(trained / "run", moved)
    assert publish_run(moved, chain) == 0
    elsewhere = learn(trained, "elsewhere", "run.keep=50", resume=str(trained / "run"))
    assert publish_run(elsewhere, chain) == 1


def test_a_run_that_goes_on_with_other_data_is_the_run_it_was(trained: Path, tmp_path: Path) -> None:
    grow(tmp_path, 5, 9)
    recipe = [*SMALL, *ON_A_LOG, "run.eval_every=0", f"data.path={tmp_path}/log", f"run.out={tmp_path}/run"]
    told = Recorder()
    train_run(
        load_config(None, recipe), resume=str(trained / "run"), open_terminal=lambda _: told, new_data=True
    )
    shutil.copytree(trained / "chain", tmp_path / "chain")
    assert publish_run(tmp_path / "run", tmp_path / "chain") > 0


def test_a_chain_that_does_not_say_takes_the_run_from_then_on(trained: Path, tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    shutil.copytree(trained / "chain", chain)
    said = json.loads((chain / "current.json").read_text())
    for name in ("run", "run_dir"):
        said["facts"].pop(name)
    (chain / "current.json").write_text(json.dumps(said))
    assert publish_run(trained / "long", chain) == 1
    with pytest.raises(CheckpointError, match="another run"):
        publish_run(trained / "run", chain)


def test_a_checkpoint_that_does_not_say_is_told_by_its_recipe_and_data(trained: Path) -> None:
    meta = read_meta(saved_in(trained / "run" / "checkpoints")[-1])
    known = meta.pop("identity")
    assert publishing._identity(meta) == known
    meta["recipe"]["run"]["seed"] += 1
    assert publishing._identity(meta) != known
