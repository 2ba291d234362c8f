"""A resumed run says in its first line from where, how old that is, and what has changed since."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from freescale.app.run.train_run import train_run
from freescale.recipe import load_config
from freescale.train import read_meta
from freescale.train.state.resume_story import ResumeStory, resume_story
from tests.small_run import SMALL, Recorder, make_run


def go(folder: Path, *keys: str) -> list[dict[str, object]]:
    terminal = Recorder()
    config = load_config(None, [*SMALL, f"run.out={folder}", *keys])
    train_run(config, resume="auto", open_terminal=lambda total: terminal)
    return terminal.events


def test_the_first_line_says_from_where_how_old_and_what_has_changed(tmp_path: Path) -> None:
    first = go(tmp_path, "run.steps=2", "data.workers=0")
    assert first[0]["event"] == "start", "nothing is resumed"
    again = go(tmp_path, "run.steps=3", "data.workers=1")[0]
    assert again["event"] == "resume"
    message = str(again["message"])
    assert message.startswith(f"resuming {tmp_path} from step 2 (written ")
    assert message.endswith("s ago on 1 rank; now run.steps 2 -> 3, data.workers 0 -> 1)")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kept = next(line for line in lines if line["event"] == "resume")
    assert kept["changes"] == ["run.steps 2 -> 3", "data.workers 0 -> 1"]
    assert kept["path"].endswith("step-00000002")
    assert go(tmp_path, "run.steps=3", "data.workers=1")[0]["message"].endswith("nothing has changed since)")


def test_other_hosts_versions_and_numbers_of_ranks_are_told(tmp_path: Path) -> None:
    go(tmp_path, "run.steps=2")
    path = tmp_path / "checkpoints" / "step-00000002"
    meta = read_meta(path)
    there = {"num_ranks": 4, "hosts": ["node-a", "node-b"], "torch": "2.0", "written": meta["written"] - 180}
    run, _ = make_run(("run.steps=3",), tmp_path)
    story = str(resume_story(run, path, {**meta, **there}))
    assert "(written 3 min " in story
    assert "ago on 4 ranks; now 1 rank, run.steps 2 -> 3, hosts node-a, node-b -> " in story
    assert "torch 2.0 -> " in story


def test_a_checkpoint_of_the_first_edition_goes_on_and_says_what_it_cannot_tell(tmp_path: Path) -> None:
    old = Path(__file__).parents[2] / "first_edition"
    shutil.copytree(old / "run", tmp_path / "run")
    terminal = Recorder()
    config = load_config(
        tmp_path / "run" / "config.yaml",
        [f"run.out={tmp_path / 'run'}", f"data.path={old / 'dataset'}", "run.steps=7"],
    )
    train_run(config, resume="auto", open_terminal=lambda total: terminal)
    assert "its data not compared: it does not say which they were" in terminal.events[0]["message"]
    assert terminal.of("step")[-1]["step"] == 7


@pytest.mark.parametrize("written", [None, 4e9])
def test_a_time_that_is_not_there_or_not_yet_is_no_age(written: float | None) -> None:
    text = str(ResumeStory(Path("runs/x/checkpoints/step-00000400"), 400, written, 4, ("2 ranks",)))
    ago = "" if written is None else "0 s ago "
    assert text == f"resuming runs/x from step 400 (written {ago}on 4 ranks; now 2 ranks)"
