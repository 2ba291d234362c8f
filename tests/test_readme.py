"""What the README and marked blocks of the docs tell to type runs as it stands, in an empty folder, on less data."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^<!-- test -->\n```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What makes a README command short enough for a test; everything else is run as written.
SMALLER = (
    "synthetic.users=150 synthetic.items=80 data.max_length=30 model.dim=16 head.num_negatives=16 "
    "run.steps=6 run.eval_every=3 run.device=cpu"
)
FREESCALE = """#!/bin/sh
if [ "$1" = train ]; then set -- "$@" {smaller}; fi
exec {python} -m freescale "$@"
"""
# `make run` installs packages; what it runs afterwards is checked below to be this.
MAKE = """#!/bin/sh
[ "$*" = run ] && exec freescale train run.out=runs/default
"""


PAGES = {  # page -> what its marked blocks are, in order
    "README.md": ["bash", "bash", "python", "bash"],
    "docs/balance.md": ["python"],
    "docs/prioritized.md": ["python"],
    "docs/ids.md": ["python"],
    "docs/attention.md": ["python"],
    "docs/moe.md": ["python"],
    "docs/bubbles.md": ["python"],
    "docs/simulate.md": ["bash"],
}


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, python: str) -> Path:
    """What a reader has: recipes and examples, a .venv with the command, and MovieLens-like data."""
    folder = tmp_path_factory.mktemp("clone")
    for room in ("recipes", "examples"):
        shutil.copytree(ROOT / room, folder / room)
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    freescale = FREESCALE.format(smaller=SMALLER, python=python)
    for name, text in (("freescale", freescale), ("make", MAKE)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tools / "activate").write_text(f"PATH={tools}:$PATH\n")
    lines = (f"{user} {(user * 7 + 13 * place) % 60 + 1}\n" for user in range(1, 81) for place in range(9))
    (folder / "ml-1m.txt").write_text("".join(lines))
    return folder


def run(language: str, text: str, folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [python, "-c", text]
    environment = {**os.environ, "PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("page", PAGES)
def test_there_are_blocks_to_test(page: str) -> None:
    assert [language for language, _ in blocks(page)] == PAGES[page]


def test_the_readme_is_short_enough_to_read() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


# One test and in this order: later blocks use what earlier ones have made. Each has its own limit (`run`).
@pytest.mark.timeout(400)
def test_every_block_runs(clone: Path, python: str) -> None:
    for page in PAGES:
        for language, text in blocks(page):
            result = run(language, text, clone, python)
            assert result.returncode == 0, f"{page}\n{text}\n{result.stdout}\n{result.stderr}"
    for made in (
        "runs/default/report.html",
        "runs/on/compare.html",
        "runs/on/.gitignore",
        "export/ml1m/manifest.json",
    ):
        assert (clone / made).exists(), made


def test_make_run_ends_in_the_command_that_is_tested() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^run:.*\n\t\$\(BIN\)/freescale train run\.out=runs/default$", makefile, re.MULTILINE)


def test_links_and_pictures_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert len(targets) > 10
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_command_is_listed() -> None:
    from freescale.app.cli import app

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert [name for name in names if f"`freescale {name}" not in text] == []
