"""Files written as a whole: what a killed writer left is cleared, what a living one writes is not."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
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


def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    other = tmp_path / ".x.elsewhere.1"
    with other.open("w") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        with whole_file(tmp_path / "x") as file:
            file.write("whole")
        assert names(tmp_path) == [other.name, "x"]
    with whole_file(tmp_path / "x") as file:
        file.write("again")
    assert names(tmp_path) == ["x"]


def test_two_writers_at_once_both_come_to_their_end(tmp_path: Path) -> None:
    writer = (
        "import sys; from pathlib import Path; from freescale.trace import whole_file\n"
        "for n in range(300):\n"
        f"    with whole_file(Path({str(tmp_path)!r}) / 'x') as file:\n"
        "        file.write('whole')"
    )
    both = [subprocess.Popen([sys.executable, "-c", writer]) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert names(tmp_path) == ["x"]


def test_a_writer_waits_for_one_who_takes_its_file_for_abandoned(tmp_path: Path, monkeypatch) -> None:
    real, removers = fcntl.flock, []

    def removed_meanwhile(file, how):
        """Just before the writer locks its file, another one has done so, and removes it a moment later."""
        if not removers:
            (aside,) = tmp_path.iterdir()
            held = aside.open("rb")
            real(held, fcntl.LOCK_EX)
            removers.append(threading.Timer(0.2, lambda: (aside.unlink(), held.close())))
            removers[0].start()
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with whole_file(tmp_path / "x") as file:
        removers[0].join()
        file.write("whole")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x").read_text() == "whole"


def test_an_error_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("before")
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "x") as file:
        file.write(str(1 / 0))
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x").read_text() == "before"
