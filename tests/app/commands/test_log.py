"""`freescale log`: what you type and what you get."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from freescale.app.cli import app
from freescale.errors import DataError
from tests.data.log.reference import write_csv


def _run(*words: object) -> str:
    result = CliRunner().invoke(app, ["log", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_windows_are_appended_listed_and_dropped(tmp_path: Path) -> None:
    day = 86_400
    log = tmp_path / "log"
    events = [(1, 10, 5), (1, 11, 6), (1, 12, day + 5), (2, 10, day + 6), (2, 11, day + 7)]
    said = _run("append", log, write_csv(tmp_path / "a.csv", events), "--every", "1d", "--max-late", "2d")
    assert "window 0, up to 1970-01-01 00:00:06 UTC: 1 rows, 2 events, 1 targets, 2 items so far" in said
    assert "window 1, up to 1970-01-02 00:00:07 UTC: 2 rows, 3 events, 2 targets, 3 items so far" in said
    late = write_csv(tmp_path / "b.csv", [(1, 13, 6), (2, 14, 2 * day)])
    assert "1 events were late" in _run("append", log, late)
    assert "1 of 3 windows are deleted" in _run("drop", log, "--before", 1)
    shown = _run("show", log)
    assert "2 items so far; deleted\n" in shown
    assert "rows of at most 200 inputs" in shown
    with pytest.raises(DataError, match="--every is not a length of time"):
        _run("append", log, late, "--every", "tomorrow")
