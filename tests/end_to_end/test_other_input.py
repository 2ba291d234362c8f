"""A run folder whose raw input was written anew, or that is given another one; an evaluation of other data says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from freescale.app.cli import app
from tests.small_run import SMALL


def write(path: Path, *, users: int, add: int = 0, items: int = 9) -> Path:
    lines = [
        f"u{user},i{(user + event + add) % items},{100 * event}"
        for user in range(users)
        for event in range(7)
    ]
    path.write_text("user,item,time\n" + "\n".join(lines) + "\n")
    return path


def call(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, " ".join((done.output + str(done.exception or "")).split())


def train(raw: Path, out: Path, *options: str) -> tuple[int, str]:
    return call(
        "train", *SMALL, "run.steps=4", "data.global_batch=8", f"data.path={raw}", f"run.out={out}", *options
    )


def test_another_file_is_never_taken_for_the_one_that_was_prepared(tmp_path: Path) -> None:
    first, other = write(tmp_path / "first.csv", users=30), write(tmp_path / "other.csv", users=20)
    out = tmp_path / "run"
    code, said = train(first, out)
    assert code == 0, said
    assert "30 users" in said
    code, said = train(other, out)
    assert code != 0
    assert "was prepared from" in said
    assert "--resume never" in said
    code, said = train(other, out, "--resume", "never")
    assert code == 0, said
    assert "in the place of other input" in said
    assert "20 users" in said


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_run_that_is_looked_at_says_that_its_data_are_other_ones(command: str, tmp_path: Path) -> None:
    raw, folder, out = write(tmp_path / "raw.csv", users=30), tmp_path / "prepared", tmp_path / "run"
    call("prepare", raw, folder)
    assert train(folder, out)[0] == 0
    words = [command, out, *([tmp_path / "export"] if command == "export" else [])]
    assert "learnt from other data" not in call(*words)[1]
    call("prepare", write(raw, users=30, add=1), folder, "--overwrite")
    if command == "export":
        words[-1] = tmp_path / "again"
    code, said = call(*words)
    assert code == 0, said
    assert "has learnt from other data" in said


def test_other_data_that_do_not_fit_are_named_as_the_cause(tmp_path: Path) -> None:
    """Of more items; it was laid to the recipe, or the version."""
    raw, folder, out = write(tmp_path / "raw.csv", users=30), tmp_path / "prepared", tmp_path / "run"
    call("prepare", raw, folder)
    assert train(folder, out)[0] == 0
    call("prepare", write(raw, users=30, items=20), folder, "--overwrite")
    for words in (["evaluate", out], ["export", out, tmp_path / "export"]):
        code, said = call(*words)
        assert code != 0
        assert "has learnt from other data than data.path holds" in said
        assert "items: 9 then, 20 now" in said
        assert f"bring back what was at {folder}" in said


def test_bad_input_on_the_way_leads_to_prepare_and_a_data_set_is_no_run_folder(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.csv", users=30)
    raw.write_text(raw.read_text().replace("u3,i4,100", "u3,,100"))
    code, said = train(raw, tmp_path / "run")
    assert code != 0
    assert f"options are those of `freescale prepare {raw} OUT_DIR`" in said
    call("prepare", raw, tmp_path / "prepared", "--bad-lines", "skip")
    code, said = train(tmp_path / "prepared", tmp_path / "prepared")
    assert code != 0
    assert "run.out is a data set" in said


def test_a_log_says_all_that_does_not_go_with_it_and_takes_no_data_set(tmp_path: Path) -> None:
    """Before: with data.split=temporal it was asked for rows of all windows at once, and said so."""
    raw = write(tmp_path / "raw.csv", users=30)
    assert call("log", "append", tmp_path / "log", raw)[0] == 0
    keys = (
        "embedding.id_map=zero_collision",
        "embedding.rows=500",
        "data.split=temporal",
        "data.global_tokens=99",
    )
    _, said = train(tmp_path / "log", tmp_path / "run", *keys)
    assert "data.split: a log is split by its windows" in said
    assert "data.global_tokens" in said
    call("prepare", raw, tmp_path / "prepared")
    assert (
        "this is a prepared data set" in call("log", "append", tmp_path / "other", tmp_path / "prepared")[1]
    )
