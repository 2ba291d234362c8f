"""Files written as a whole: what a killed writer left is cleared, what a living one writes is not."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from freescale.trace import whole_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_half_a_file_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    killed = (
        "import os, signal, sys; from pathlib import Path; from freescale.trace import whole_file\n"
        f"with whole_file(Path({str(tmp_path)!r}) / 'trace.json') as file:\n"
        "    file.write('half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert len(names(tmp_path)) == 1
    with whole_file(tmp_path / "trace.json") as file:
        file.write("whole")
    assert names(tmp_path) == ["trace.json"]
    assert (tmp_path / "trace.json").read_text() == "whole"


def test_what_living_processes_and_other_machines_write_stays(tmp_path: Path) -> None:
    (tmp_path / f".x.{platform.node()}.{os.getppid()}").touch()
    (tmp_path / ".x.elsewhere.1").touch()
    (tmp_path / ".x.long-gone.1").touch()
    os.utime(tmp_path / ".x.long-gone.1", (0, 0))
    with whole_file(tmp_path / "x") as file:
        file.write("whole")
    assert names(tmp_path) == sorted([f".x.{platform.node()}.{os.getppid()}", ".x.elsewhere.1", "x"])


def test_an_error_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("before")
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "x") as file:
        file.write(str(1 / 0))
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x").read_text() == "before"
