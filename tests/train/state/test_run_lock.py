"""Two runs never share a folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from freescale.errors import TrainingError
from freescale.train.state.run_lock import sole_run


def in_another_process(out: Path, *, first: bool = True) -> bool:
    """Whether a run there gets the folder."""
    pid = os.fork()
    if not pid:
        try:
            with sole_run(out, first=first):
                os._exit(0)
        except TrainingError as error:
            os._exit(1 if "already going on" in str(error) and "run.out" in str(error) else 2)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 0


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
    out = tmp_path / "deep" / "run"
    with sole_run(out, first=True):
        assert not in_another_process(out)
        assert in_another_process(out, first=False)
        assert in_another_process(tmp_path / "other")
    assert in_another_process(out)


@pytest.mark.parametrize("leaves_a_child", [False, True])
def test_a_run_that_was_killed_keeps_nobody_out(tmp_path, leaves_a_child):
    """Not even where a process it had forked lives on."""
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        with sole_run(tmp_path, first=True):
            child = os.fork() if leaves_a_child else 1
            if child:
                os.write(told, child.to_bytes(4, "little"))
            signal.pause()
    child = int.from_bytes(os.read(ready, 4), "little")
    assert not in_another_process(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert in_another_process(tmp_path)
    if leaves_a_child:
        os.kill(child, signal.SIGKILL)
    os.close(ready)
    os.close(told)
