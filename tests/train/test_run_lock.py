"""Two runs never share a folder."""

from __future__ import annotations

import os
import signal

import pytest

from freescale.errors import TrainingError
from freescale.train.run_lock import sole_run


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
    out = tmp_path / "deep" / "run"
    with sole_run(out, first=True):
        with (
            pytest.raises(TrainingError, match=r"already going on[\s\S]*run\.out"),
            sole_run(out, first=True),
        ):
            pass
        with sole_run(tmp_path / "other", first=True), sole_run(out, first=False):
            pass
    with sole_run(out, first=True):
        pass


def test_a_run_that_was_killed_keeps_nobody_out(tmp_path):
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        with sole_run(tmp_path, first=True):
            os.write(told, b"x")
            signal.pause()
    assert os.read(ready, 1) == b"x"
    with pytest.raises(TrainingError), sole_run(tmp_path, first=True):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with sole_run(tmp_path, first=True):
        pass
    os.close(ready)
    os.close(told)
