"""The command line itself: what it answers without any work."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import freescale
from freescale.app.cli import app
from freescale.errors import ConfigError
from freescale.registry import names


@pytest.mark.timeout(120)
def test_the_version_is_told_without_torch() -> None:
    code = (
        "import sys; from freescale.app.cli import app\n"
        "try: app(['--version'])\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.splitlines() == [f"freescale {freescale.__version__}", "0 False"]


@pytest.mark.parametrize("command", [["prepare"], ["log", "append"]])
def test_help_names_every_format_that_ships(command: list[str]) -> None:
    output = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "300"}).output
    said = next(line for line in output.splitlines() if "--format" in line)
    assert names("format")
    assert not [name for name in ("auto", *names("format")) if name not in said]


def test_help_says_what_it_is_for_and_lists_the_commands() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    assert "one device or many" in output
    for name in ("version", "train", "simulate", "doctor"):
        assert name in output


def test_keys_are_found_by_a_word_whole_when_piped_and_as_json() -> None:
    lines = CliRunner().invoke(app, ["keys"]).output.splitlines()
    assert len(lines) > 100
    assert all(line.count("\t") == 3 for line in lines)
    found = CliRunner().invoke(app, ["keys", "Checkpoints"]).output.splitlines()
    assert 0 < len(found) < len(lines)
    assert any(line.startswith("run.checkpoint_every\tint | null\tnull\t") for line in found)
    rows = json.loads(CliRunner().invoke(app, ["keys", "--json"]).output)
    assert ["\t".join(row.values()) for row in rows] == lines


def test_options_of_kinds_are_found_with_the_kind_they_belong_to() -> None:
    lines = CliRunner().invoke(app, ["keys", "head.tasks"]).output.splitlines()
    assert lines[0].startswith("head.tasks\tlist of str\t\twith head.kind=tasks: one line a task")


def test_a_word_that_no_key_has_is_told() -> None:
    with pytest.raises(ConfigError, match="no recipe key has this word"):
        CliRunner().invoke(app, ["keys", "nonsense"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("environment", "told"),
    [({}, True), ({"RANK": "0", "WORLD_SIZE": "3"}, True), ({"RANK": "1", "WORLD_SIZE": "3"}, False)],
)
def test_train_says_what_it_is_about_to_do_before_torch_is_imported(
    environment: dict[str, str], told: bool
) -> None:
    """The first line stood behind the import of torch: 5 s of silence."""
    code = (
        "import sys; from freescale.app.commands import run\n"
        "def stop(*_, **__): print('torch' in sys.modules); raise SystemExit\n"
        "run._launched = stop\n"
        "from freescale.app.cli import app; app(['train', 'run.out=elsewhere'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        **{"capture_output": True, "text": True, "timeout": 100, "check": True},
        env={
            **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
            **environment,
        },
    )
    ranks = ", 3 ranks" if environment else ""
    line = f"freescale {freescale.__version__}: hstu on synthetic{ranks}, into elsewhere; loading torch\n"
    assert done.stdout == "False\n"
    assert done.stderr == (line if told else "")
