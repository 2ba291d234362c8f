"""The command line itself: what it answers without any work."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import freescale
from freescale.app.cli import app


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


def test_help_says_what_it_is_for_and_lists_the_commands() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    assert "almost no wasted GPU time" in output
    for name in ("version", "train", "simulate", "doctor"):
        assert name in output
